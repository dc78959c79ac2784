"""What dead workers left in the spool is committed at the start, and no single result can prevent the start."""

from __future__ import annotations

import json
import stat
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from models_db import claims
from models_db.claims import FinishItem
from models_db.errors import DatabaseUnavailableError
from models_db.jobs import job_status
from models_db.tables import JobState
from tests.db.helpers import add_jobs, add_workers, claim_one, new_result
from workers import leftovers as module
from workers.leftovers import replay
from workers.spool import Spool

TOO_LARGE = 2**70  # for any column


@pytest.fixture
def fleet(db):
    add_workers(db, "dead")
    ids = [f"j{number:02}" for number in range(70)]
    add_jobs(db, *ids)
    for job_id in ids:
        claim_one(db, job_id, "dead")
    return db


def leave(folder, *items):
    spool = Spool(folder, "me", "dead", 10**8)
    assert all(spool.add(item) for item in items)
    spool.close()


def success(job_id, text="an answer", **fields):
    return FinishItem(job_id, 1, JobState.SUCCEEDED, new_result(text, **fields))


def states(engine, *ids):
    with engine.connect() as conn:
        return [job_status(conn, job_id).state for job_id in ids]


def test_what_the_database_refuses_fails_alone_and_is_put_aside(fleet, tmp_path, caplog):
    bad = {"j07", "j55"}
    items = [
        success(f"j{n:02}", completion_tokens=TOO_LARGE if f"j{n:02}" in bad else 1, text=f"private {n}")
        for n in range(70)
    ]
    leave(tmp_path, *items)
    replay(fleet, tmp_path, "me")
    for item in items:
        expected = JobState.FAILED if item.job_id in bad else JobState.SUCCEEDED
        assert states(fleet, item.job_id) == [expected]
    with fleet.connect() as conn:
        assert job_status(conn, "j07").error_type
    (aside,) = tmp_path.iterdir()
    assert aside.name == "me.dead.refused"
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    kept = [json.loads(line) for line in aside.read_text().splitlines()]
    assert {entry["job_id"]: entry["result"]["text"] for entry in kept} == {
        "j07": "private 7",
        "j55": "private 55",
    }
    assert "68 of 70" in caplog.text
    assert "private" not in caplog.text
    replay(fleet, tmp_path, "me")
    assert list(tmp_path.iterdir()) == [aside], "nothing is left to do"


def test_a_failure_that_is_refused_as_well_leaves_the_job_to_the_fleet(fleet, tmp_path, monkeypatch):
    real = claims.finish

    def refuse(conn, items, worker_id, **kw):
        if any(item.job_id == "j01" for item in items):
            raise ValueError("no such end")
        return real(conn, items, worker_id, **kw)

    monkeypatch.setattr(module, "finish", refuse)
    leave(tmp_path, success("j00"), success("j01"), success("j02"))
    replay(fleet, tmp_path, "me")
    assert states(fleet, "j00", "j01", "j02") == [JobState.SUCCEEDED, JobState.RUNNING, JobState.SUCCEEDED]
    assert [path.suffix for path in tmp_path.iterdir()] == [".refused"]


@contextmanager
def away(engine, *, cuts):
    """The database goes away at so many commits."""
    left = [cuts]

    def cut(conn):
        if left[0]:
            left[0] -= 1
            conn.invalidate()
            raise DatabaseUnavailableError("gone")

    event.listen(engine, "commit", cut)
    try:
        yield
    finally:
        event.remove(engine, "commit", cut)


def test_a_database_that_is_away_costs_no_result(fleet, tmp_path):
    leave(tmp_path, success("j00"), success("j01"))
    with away(fleet, cuts=1), pytest.raises(DatabaseUnavailableError):
        replay(fleet, tmp_path, "me")
    assert states(fleet, "j00", "j01") == [JobState.RUNNING] * 2
    replay(fleet, tmp_path, "me")
    assert states(fleet, "j00", "j01") == [JobState.SUCCEEDED] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_breaks_a_working_connection_each_time_is_refused(fleet, tmp_path, monkeypatch):
    """Such as a result that is larger than the server's largest packet."""
    real = claims.finish

    def breaks(conn, items, worker_id, **kw):
        if any(item.result is not None and len(item.result.text) > 900_000 for item in items):
            conn.invalidate()
            raise DatabaseUnavailableError("server closed the connection unexpectedly")
        return real(conn, items, worker_id, **kw)

    monkeypatch.setattr(module, "finish", breaks)
    leave(tmp_path, *(success(f"j{n:02}") for n in range(5)), success("j05", "x" * 1_000_000))
    replay(fleet, tmp_path, "me")
    assert states(fleet, *(f"j{n:02}" for n in range(6))) == [JobState.SUCCEEDED] * 5 + [JobState.FAILED]


def test_lines_that_cannot_be_read_cost_only_themselves(fleet, tmp_path, caplog):
    leave(tmp_path, success("j00"))
    (path,) = tmp_path.iterdir()
    odd = [
        b"[1]",
        b"null",
        b"{}",
        b'{"state": "queued", "result": null, "job_id": "j", "attempt": 1}',
        b"\xff",
    ]
    path.write_bytes(b"\n".join(odd) + b"\n" + path.read_bytes())
    replay(fleet, tmp_path, "me")
    assert states(fleet, "j00") == [JobState.SUCCEEDED]
    assert caplog.text.count("cannot be read") == len(odd)
