"""Benchmarks run where there is a PostgreSQL of any developer's, and say what to do where there is none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import history, servers
from benchmarks.servers import postgresql

FOLDER = Path(servers.__file__).parent


def test_the_server_that_is_named_is_taken_as_it_is() -> None:
    with postgresql("postgresql://someone@db.example.com/there") as url:
        assert url == "postgresql://someone@db.example.com/there"


def test_a_server_that_refuses_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_POSTGRES_URL", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(SystemExit, match=r"--server: .*TEST_POSTGRES_URL.*Give --server") as raised:
        postgresql(None).__enter__()
    assert raised.value.code


@pytest.mark.parametrize("name", ["bulk", "history", "history_cost"])
def test_no_benchmark_knows_a_machine_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "TEST_POSTGRES_URL" in capsys.readouterr().out
    for source in FOLDER.glob("**/*.py"):
        assert "://root@" not in source.read_text(encoding="utf-8"), source


def test_a_database_that_is_to_be_kept_needs_a_server_that_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["history", "--keep"])
    with pytest.raises(SystemExit):
        history.main()
    assert "need --server" in capsys.readouterr().err
