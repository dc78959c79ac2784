"""The user that the hardening guide makes in Redis: all that a fleet does is allowed to it, and little else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from models_db.tables import JobState
from tests.fleet.conftest import FAST
from tests.fleet.fleet import Fleet, RedisServer
from workers.client import Client

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "hardening.md"
PASSWORD = "correct-horse-battery"


class GuardedRedis(RedisServer):
    """As ``RedisServer``; the fleet's user is the guide's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rule = re.search(r"^ *ACL SETUSER tokenmill (.+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
        assert rule is not None
        self.client.execute_command(
            "ACL", "SETUSER", "tokenmill", *rule[1].replace("PASSWORD", PASSWORD).split()
        )

    @property
    def url(self) -> str:
        return f"redis://tokenmill:{PASSWORD}@127.0.0.1:{self.port}/0"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    server = GuardedRedis(tmp_path)
    made = Fleet(server, f"sqlite:///{tmp_path / 'fleet.db'}", engine={"echo_tokens_per_s": 20}, **FAST)
    yield made
    made.close()
    server.stop()


def test_the_guides_user_may_do_what_a_fleet_does_and_no_more(fleet: Fleet) -> None:
    first = fleet.worker()
    with Client(fleet.settings) as client:
        assert client.submit("one two three", stream=True, max_tokens=3).wait(30).finish_reason == "length"
        events = list(client.submit("one two three", stream=True, max_tokens=3).stream(timeout_s=30))
        assert events[-1].kind == "end"
        running = client.submit("on and on", max_tokens=2000)
        fleet.wait_state(running.id, JobState.RUNNING)
        fleet.tell("revoke", task_id=running.id, terminate=True)
        fleet.wait_state(running.id, JobState.CANCELLED)
        assert fleet.send(max_tokens=2).get(timeout=30)["finish_reason"] == "length"
        assert fleet.app.control.inspect(timeout=5).ping()
        left = client.submit("on and on", max_tokens=60)
        fleet.wait_state(left.id, JobState.RUNNING)
        second = fleet.worker()
        first.kill()
        fleet.wait_state(left.id, JobState.SUCCEEDED)
        assert second.stop() == 0
    assert fleet.redis.client.execute_command("ACL", "LOG") == [], "commands that were refused"
    with redis.Redis.from_url(fleet.redis.url) as guarded:
        for forbidden in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                guarded.execute_command(*forbidden)
