"""The exit codes of a worker process, as ``sysexits.h`` has them. The supervisor starts it again after all but one."""

from __future__ import annotations

EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL
EXIT_CONFIGURATION = 78  # EX_CONFIG: starting again would not help

REASONS = {
    EXIT_ENGINE_DEAD: "its engine died",
    EXIT_TRY_AGAIN: "something it needs is away",
    EXIT_CONFIGURATION: "its configuration is wrong",
}
