"""One worker process: ``python -m workers.process``, with its settings as JSON on standard input.

Started by ``workers.supervisor``. Settings come through the pipe so that credentials are in no argument list.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from celery.exceptions import SecurityWarning

from backend.api import ConfigurationError
from workers.app import TokenmillApp, make_app
from workers.exits import EXIT_CONFIGURATION
from workers.payload import queue_for
from workers.redaction import redact_text
from workers.settings import Settings
from workers.watchdog import leave_at_once

logger = logging.getLogger("tokenmill.worker")

_PR_SET_PDEATHSIG = 1


def run_process(settings: Settings) -> int:
    """Run a Celery worker on this thread until it stops; returns its exit code."""
    quieten()
    app = make_app(settings)
    app.set_current()
    try:
        import_modules(app, settings.worker_imports)
    except ConfigurationError as exc:
        logger.critical("The worker cannot start: %s", redact_text(str(exc)))
        return EXIT_CONFIGURATION
    worker = app.Worker(
        hostname=f"tokenmill-{os.getpid()}@{settings.worker_name}",
        concurrency=settings.engine_config.max_num_seqs,
        queues=[queue_for(settings.model)],
        loglevel=settings.log_level.upper(),
        quiet=True,  # the pool shows a banner of our own
        without_gossip=True,
        no_color=not sys.stderr.isatty(),
    )
    worker.start()
    code = int(worker.exitcode or 0)
    if getattr(worker.pool, "hung", False):
        leave_at_once(code)
    return code


def import_modules(app: TokenmillApp, names: Sequence[str]) -> None:
    """Import the user's own modules.

    Raises:
        ConfigurationError: one of them cannot be imported, whatever its code raises: it would again at each start.
    """
    for name in names:
        try:
            app.loader.import_task_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # also SystemExit, which a script without a guard may raise
            fix = (
                "Install that module, or start the worker in the folder that holds it"
                if isinstance(exc, ModuleNotFoundError)
                else f"Mend it until python -c 'import {name}' works"
            )
            raise ConfigurationError(
                f"worker_imports (TOKENMILL_WORKER_IMPORTS): {name!r} cannot be imported: "
                f"{type(exc).__name__}: {exc}{_raised_at(exc)}. {fix}"
            ) from exc


def _raised_at(exc: BaseException) -> str:
    """Where in the modules; of an error of syntax the text says so itself."""
    frames = [] if isinstance(exc, SyntaxError) else traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


def quieten() -> None:
    """Keep out of the log what says nothing about this worker."""
    # About pickle as root; nothing but JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)


def main() -> int:
    """Entry point of the module."""
    stop_with_parent()
    return run_process(Settings.model_validate_json(sys.stdin.read()))


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM when the supervisor dies, so that no worker outlives it unseen (Linux)."""
    if not sys.platform.startswith("linux") or not Path("/proc/self").exists():
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
