"""What the pool says of database errors, which may quote rows and so prompts."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from sqlalchemy.exc import IntegrityError

from workers.pool import EnginePool, _on_accepted

REFUSED = IntegrityError(
    "INSERT INTO job",
    {},
    Exception("violates a constraint\nDETAIL:  Failing row contains (a private prompt)."),
    hide_parameters=True,
)


def test_a_refused_row_is_logged_without_its_contents(caplog: pytest.LogCaptureFixture) -> None:
    stored: Future[None] = Future()
    stored.set_exception(REFUSED)
    _on_accepted("j", stored)
    EnginePool._on_database_health(EnginePool(2), False, REFUSED)
    assert caplog.text.count("IntegrityError") >= 2
    assert "private" not in caplog.text
