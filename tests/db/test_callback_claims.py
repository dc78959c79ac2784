"""Due callbacks are taken by one sender at a time, host by host, and never lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Engine, text

from models_db.callbacks import (
    CallbackState,
    callback_counts,
    claim_due,
    database_now,
    record_delivered,
    record_failed,
    record_retry,
    retry_callbacks,
)
from models_db.jobs import request_cancel
from models_db.migrate import upgrade
from models_db.session import make_engine, transaction
from tests.db.callback_world import (
    CALLBACK,
    HOST,
    LEASE,
    add_with_callback,
    hosts,
    of_job,
    run_to_end,
    states,
    take,
)


def test_a_lease_keeps_others_away_until_it_ends(world: Engine) -> None:
    """The sender is killed between sending and writing that down: another one sends again, under the same id."""
    add_with_callback(world, "j")
    run_to_end(world, "j")
    (first,) = take(world, lease=timedelta(seconds=-1))  # over at once
    (second,) = take(world)
    assert (first.message_id, first.tries) == (second.message_id, 1)
    assert second.tries == 2
    assert take(world) == [], "it is leased"
    assert hosts(world) == ([], "")
    with world.begin() as conn:
        assert not record_retry(conn, first, "late", database_now(conn)), "another one has it"
        assert not record_delivered(conn, first)
        assert record_delivered(conn, second)
        assert not record_delivered(conn, second), "once"
    assert states(world) == {"j": CallbackState.DELIVERED}
    assert take(world) == []


def test_senders_at_once_take_each_callback_once(world: Engine) -> None:
    names = [f"j{number:02}" for number in range(24)]
    add_with_callback(world, *names)
    with world.begin() as conn:
        request_cancel(conn, names)
    taken: list[str | None] = []
    together = threading.Barrier(4)

    def sender() -> None:
        together.wait()
        misses = 0
        while misses < 5:
            mine = transaction(world, lambda conn: claim_due(conn, HOST, 3, database_now(conn), LEASE))
            misses += not mine
            taken.extend(it.job_id for it in mine)

    threads = [threading.Thread(target=sender) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, taken)) == names


def test_a_retry_is_due_when_it_says_and_a_failure_never_again(world: Engine) -> None:
    add_with_callback(world, "later", "never")
    run_to_end(world, "later")
    run_to_end(world, "never")
    claims = {it.job_id: it for it in take(world)}
    with world.begin() as conn:
        assert record_retry(conn, claims["later"], "HTTP 503", database_now(conn) + timedelta(hours=1))
        assert record_failed(conn, claims["never"], "HTTP 410\x00" + "x" * 5000)
    assert states(world) == {"later": CallbackState.DUE, "never": CallbackState.FAILED}
    assert hosts(world) == ([], "")
    assert of_job(world, "later").error == "HTTP 503"
    error = of_job(world, "never").error
    assert error is not None
    assert (len(error), "\x00" in error) == (1000, False)
    with world.begin() as conn:
        assert callback_counts(conn) == {"due": 1, "failed": 1}
        assert retry_callbacks(conn, host="other.example.com") == 0
        assert retry_callbacks(conn, ["later", "never"]) == 1
    (again,) = take(world)
    assert again.message_id == claims["never"].message_id, "receivers know it by its id"


def test_hosts_are_looked_at_in_turn(world: Engine) -> None:
    for number in range(5):
        add_with_callback(world, f"j{number}", callback=replace(CALLBACK, host=f"h{number}"))
    with world.begin() as conn:
        request_cancel(conn, [f"j{number}" for number in range(5)])
    found, after = hosts(world, limit=2)
    assert (found, after) == (["h0", "h1"], "h1")
    found, after = hosts(world, after=after, limit=3)
    assert (found, after) == (["h2", "h3", "h4"], "h4")
    assert hosts(world, after=after) == ([], "")
    (only,) = take(world, host="h3")
    assert only.job_id == "j3"


def test_looking_costs_the_same_however_many_wait(tmp_path: Path) -> None:
    """A million jobs that run must not be looked through each second: the plan uses the index alone."""
    url = f"sqlite:///{tmp_path / 'plans.db'}"
    upgrade(url)
    engine = make_engine(url)
    with engine.connect() as conn:
        for query in (
            "SELECT min(host) FROM callback WHERE state = 'due' AND host > 'a'",
            "SELECT min(due_at) FROM callback WHERE state = 'due' AND host = 'a'",
            "SELECT id FROM callback WHERE state = 'due' AND host = 'a' AND due_at <= 'b' ORDER BY due_at LIMIT 9",
        ):
            plan = " ".join(str(row[3]) for row in conn.execute(text(f"EXPLAIN QUERY PLAN {query}")))
            assert "SEARCH callback USING" in plan, plan
            assert "ix_callback_state_host_due_at" in plan, plan
            assert "TEMP B-TREE" not in plan, plan
    engine.dispose()
