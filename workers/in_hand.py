"""A message that Redis has given away and takes no note of is nowhere but here: its job gets its row at once.

The database may be there although Redis is not. With its row the job is accepted: should this process end before Redis
takes the message back, a sweeper publishes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from models_db.errors import InvalidValueError
from models_db.records import NewJob
from workers.intake import new_job
from workers.payload import STORED_HEADER, TASK_NAME
from workers.settings import Settings
from workers.stored import read_stored


def job_in_hand(raw: bytes, settings: Settings, now: datetime) -> NewJob | None:
    """The row of a message's job, with the message; ``None`` where it has one already, or can have none.

    Raises nothing, whatever the message holds.
    """
    try:
        message = json.loads(raw)
        headers, info = message["headers"], message["properties"]["delivery_info"]
        if headers["task"] != TASK_NAME or headers.get(STORED_HEADER) is True:
            return None
        job_id = headers["id"]
    except Exception:
        return None  # what cannot be read is put aside when it comes again
    try:
        return new_job(job_id, info, message, read_stored(message).payload, settings, now)
    except Exception:
        return _bare(job_id, info, message, settings, now)


def _bare(
    job_id: Any, info: Any, message: Mapping[str, Any], settings: Settings, now: datetime
) -> NewJob | None:
    """What is wrong with it is said by whoever claims it."""
    try:
        return new_job(job_id, info, message, None, settings, now)
    except (InvalidValueError, AttributeError, TypeError):
        return None
