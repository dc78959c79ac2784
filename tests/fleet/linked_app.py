"""A worker's application with a task of its own beside ours, for links, chains and chords.

Run with ``celery -A tests.fleet.linked_app worker``.
"""

from __future__ import annotations

from typing import Any

from workers.app import make_app
from workers.settings import load_settings

app = make_app(load_settings())


@app.task(name="tests.collect")  # type: ignore[untyped-decorator]
def collect(results: Any) -> Any:
    """What a caller might do with one answer or with many."""
    if isinstance(results, dict):
        return {"collected": results["text"]}
    return {"collected": sorted(result["text"] for result in results)}
