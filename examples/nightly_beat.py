"""A night's file from Celery beat: a task of your own application submits it and leaves.

Run a worker and beat for this application beside Tokenmill's own worker:

    celery --app nightly_beat --workdir examples worker --beat

The hour is UTC's, unless app.conf.timezone says otherwise.
The answers are collected in the morning: tokenmill bulk resume BATCH -o answers.jsonl
"""

from __future__ import annotations

import os
import subprocess
import sys

from celery import Celery
from celery.schedules import crontab

app = Celery("nightly", broker=os.environ.get("NIGHTLY_BROKER_URL", "redis://127.0.0.1:6379/1"))
app.conf.beat_schedule = {
    "prompts": {"task": "nightly.submit", "schedule": crontab(hour=1, minute=15), "args": ["prompts.jsonl"]}
}


@app.task(name="nightly.submit")
def submit(path: str) -> str:
    """Submit the file and return its batch's id."""
    command = [sys.executable, "-m", "workers.cli", "bulk", "run", path, "--no-wait", "--deadline", "6h"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()
