"""Enqueue with plain Celery and none of our packages: only the task's name, its queue and a JSON payload.

Any language with a Celery client can do the same. Run:  python examples/send_task.py
"""

from __future__ import annotations

import os

from celery import Celery

BROKER = os.environ.get("TOKENMILL_BROKER_URL", "redis://127.0.0.1:6379/0")


def main() -> None:
    """Send one job and print what Celery's own result backend returns."""
    app = Celery(broker=BROKER, backend=BROKER)
    payload = {
        "version": 1,
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 32,
    }
    sent = app.send_task("tokenmill.generate", args=[payload], queue="tokenmill.smollm2")
    print(sent.get(timeout=120)["text"])


if __name__ == "__main__":
    main()
