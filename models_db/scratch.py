"""Space for more rows than should be in memory: a private temporary SQLite file, which spills to disk by itself."""

from __future__ import annotations

import sqlite3


def scratch_file() -> sqlite3.Connection:
    """An empty one, gone when it is closed; used by one thread at a time.

    It may be closed by another: a generator that nobody reads to its end is closed wherever the garbage is collected.
    """
    return sqlite3.connect("", check_same_thread=False)
