"""Dead letters as the sweeper finds them in Redis, whoever wrote them: a newer worker, or none of ours at all."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from celery.utils.log import get_logger

from models_db.base import Uuid
from models_db.dead_letters import NewDeadLetter
from models_db.text import clean_text

logger = get_logger(__name__)

_TEXTS = ("id", "queue", "worker_id", "reason", "message")
_KNOWN = {field.name for field in fields(NewDeadLetter)} - {"received_at"}
_UNREADABLE = "a dead letter that this worker cannot read; the message is the whole of it"
_NEWER = "put aside by a newer worker; the message is the whole dead letter"
_FAMILY = uuid.UUID("5bd2f4f5-3c77-4b7c-a1c0-3f0f8f9a2f0e")


def read_letter(raw: bytes, queue: str, worker_id: str) -> NewDeadLetter:
    """The row for what ``workers.transport`` has put aside.

    Nothing of it is lost: with fields that this version does not know, or where it cannot be read at all, the row's
    message is the whole letter. The same letter always gets the same id, so that it is stored once.
    """
    text = raw.decode(errors="backslashreplace")
    try:
        letter = json.loads(text)
    except (ValueError, RecursionError):
        letter = None
    if not isinstance(letter, Mapping) or not _fits(letter):
        logger.error(
            "A dead letter of queue %s cannot be read; it is kept whole in the table dead_letter", queue
        )
        return NewDeadLetter(str(uuid.uuid5(_FAMILY, text)), queue, worker_id, _UNREADABLE, text)
    known: dict[str, Any] = {name: letter[name] for name in _KNOWN if name in letter}
    if strange := sorted(set(letter) - _KNOWN):
        logger.warning("Dead letter %s has %d fields of a newer version", known["id"], len(strange))
        known |= {"reason": f"{known['reason']} ({_NEWER})", "message": text}
    return NewDeadLetter(**known)


def _fits(letter: Mapping[str, Any]) -> bool:
    if not all(isinstance(letter.get(name), str) for name in _TEXTS):
        return False
    ids = [letter["id"], letter["worker_id"]]
    storable = all(len(each) <= (Uuid.length or 0) and clean_text(each) == each for each in ids)
    return storable and bool(letter["id"]) and isinstance(letter.get("job_id"), str | None)
