"""Lengths of time and moments on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from backend.api import MAX_DEADLINE_S, ConfigurationError, RequestError
from models_db.migrate import upgrade
from workers.cli import app
from workers.cli.durations import age, days_of, moment, seconds_of, waiting_s
from workers.settings import Settings, load_settings

NOW = datetime(2026, 1, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("30s", 30),
        ("15m", 900),
        ("6h", 21_600),
        ("1.5d", 129_600),
        (" 2w ", 1_209_600),
        ("3650d", MAX_DEADLINE_S),
    ],
)
def test_lengths(text: str, seconds: float) -> None:
    assert seconds_of(text, "--deadline") == seconds


def test_ages_and_moments() -> None:
    assert age("2w", "--older-than") == timedelta(days=14)
    assert moment("24h", "--since", now=NOW) == datetime(2026, 1, 9, tzinfo=UTC)
    assert moment("2026-01-02T03:04", "--since") == datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    assert moment(None, "--since") is None


@pytest.mark.parametrize("read", [seconds_of, age, moment])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "d",
        "0d",
        "-1d",
        "1e9d",
        "nan",
        "inf",
        "99999999d",
        "9" * 400 + "h",
        "1y",
        "yesterday",
        "\u0663d",
        "0001-01-01x",
    ],
)
def test_what_is_no_length_is_refused_by_name_value_and_fix(
    read: Callable[[str, str], object], text: str
) -> None:
    with pytest.raises(RequestError, match=r"--option: is .*(Write|Use|Choose)") as caught:
        read(text, "--option")
    assert caught.value.field == "--option"
    assert caught.value.fix


@pytest.mark.parametrize("text", ["0001-01-01", "9999-12-31T23:59:59", "1969-12-31"])
def test_a_moment_that_nothing_can_be_reckoned_from_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is too far away"):
        moment(text, "--until")


@given(st.text("0123456789.smhdw-+einfa \u0663:T", max_size=20))
@example("9" * 15 + "w")
def test_any_text_is_a_length_or_a_clear_error(text: str) -> None:
    for read in (seconds_of, age, moment):
        try:
            made = read(text, "--option")
        except RequestError as refused:
            error = refused
        else:
            assert made is not None
            continue
        assert error.fix


@pytest.mark.parametrize("check", [waiting_s, days_of])
@pytest.mark.parametrize("value", [-1.0, 1e300, math.inf, math.nan])
def test_numbers_out_of_range_are_refused(check: Callable[[float, str], float], value: float) -> None:
    with pytest.raises(RequestError, match="--option: is out of range"):
        check(value, "--option")
    assert check(1.0, "--option") == 1.0


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'tokenmill.db'}"
    upgrade(url)
    return url


@pytest.mark.parametrize(
    "arguments",
    [
        ["bulk", "run", "examples/prompts.jsonl", "--no-wait", "--deadline", "99999999d"],
        ["bulk", "run", "examples/prompts.jsonl", "--no-wait", "--reuse-days", "1e9"],
        ["bulk", "run", "examples/prompts.jsonl", "--no-wait", "--reuse-days", "nan"],
        ["stats", "--since", "99999999d"],
        ["stats", "--until", "9999-12-31"],
        ["db", "prune", "--older-than", "99999999d"],
        ["db", "prune", "--older-than", "90d", "--minutes-older-than", "99999999w"],
        ["db", "rollup", "--since", "99999999d"],
        ["submit", "a", "--timeout", "nan"],
        ["submit", "a", "--no-wait", "-p", "deadline_s=1e300"],
        ["serve", "--timeout", "inf"],
        *(["top", "--interval", wrong] for wrong in ("inf", "nan", "0", "-1", "1e9")),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_no_command_ends_in_a_traceback(arguments: list[str], database_url: str) -> None:
    done = CliRunner().invoke(app, [*arguments, "--database-url", database_url])
    assert done.exit_code == 2, done.output
    assert arguments[-2].split("=")[0] in done.stderr or "deadline_s" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("value", ["1e300", "inf", "nan", "-1"])
def test_no_setting_of_seconds_is_beyond_what_can_be_waited_for(value: str) -> None:
    names = [name for name in Settings.model_fields if name.endswith("_s")]
    assert len(names) > 15
    for name in names:
        with pytest.raises(ConfigurationError, match=name):
            load_settings(**{name: value})
