"""The benchmarks count right and refuse a system that does other work than it was given."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from backend.api import ConfigurationError
from benchmarks import compare, fleet, report, step_cpu, streaming, urgent
from benchmarks.compare import Measured, measure, table
from benchmarks.systems import System, Tokens
from benchmarks.workload import PROMPTS, Work, mixed, uniform
from workers.cli import bench


class FakeClock:
    """A clock that only its owner moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeSystem:
    """Takes a known time for each token."""

    def __init__(self, name: str, clock: FakeClock, token_s: float, surplus: int = 0) -> None:
        self.name = name
        self.order: list[str] = []
        self._clock, self._token_s, self._surplus = clock, token_s, surplus

    def run(self, work: Work) -> Tokens:
        self.order.append(work.name)
        self._clock.now += self._token_s * work.total
        return [(7,) * (count + self._surplus) for count in work.new_tokens]

    def close(self) -> None:
        """Nothing to close."""


PROMPT_IDS = tuple((number, number) for number in range(1, 65))


def test_there_are_64_prompts_all_different() -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({line["prompt"] for line in lines}) == len({line["custom_id"] for line in lines}) == 64


def test_workloads_repeat_and_have_the_lengths_they_claim() -> None:
    work = mixed(PROMPT_IDS)
    assert work == mixed(PROMPT_IDS)
    assert work != mixed(PROMPT_IDS, seed=1)
    assert 16 <= min(work.new_tokens) < 32
    assert 112 < max(work.new_tokens) <= 128
    assert uniform(PROMPT_IDS).total == 64 * 64
    assert work.head(2, 4).new_tokens == (4, 4)


def test_systems_take_turns_and_ratios_are_to_the_better_peer() -> None:
    clock = FakeClock()
    systems: list[System] = [
        FakeSystem("tokenmill async", clock, 0.01),
        FakeSystem("transformers generate", clock, 0.02),
        FakeSystem("transformers CB", clock, 0.04),
    ]
    works = [mixed(PROMPT_IDS), uniform(PROMPT_IDS)]
    lines: list[str] = []
    found = measure(systems, works, 2, clock=clock, say=lines.append)
    names = [system.name for system in systems]
    assert [name for line in lines for name in names if name in line] == names * 4
    ours = found["uniform"]["tokenmill async"]
    assert len(ours.seconds) == 2
    assert ours.rate(works[1]) == pytest.approx(100.0)
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(table(works[1], found["uniform"]))
    rows = [line for line in out.getvalue().splitlines() if "tokenmill" in line or "transformers" in line]
    assert [ratio in row for ratio, row in zip(("2.00", "1.00", "0.50"), rows, strict=True)] == [True] * 3
    assert all("64/64" in row for row in rows)


def test_a_table_names_the_length_of_its_own_work() -> None:
    work = mixed(PROMPT_IDS[:1])
    (length,) = work.new_tokens
    assert length != 64
    assert f"{length} new tokens" in str(table(work, {}).title)


@pytest.mark.parametrize("options", [["--works", "mixed,unknown"], ["--limit", "0"], ["--repetitions", "0"]])
def test_a_comparison_that_cannot_be_is_refused_before_anything_is_loaded(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--model", "/no/such/model", *options])
    assert options[0] in capsys.readouterr().err


def test_the_rate_of_the_fleet_needs_two_moments() -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    assert fleet.rate(10, began, began + timedelta(seconds=2)) == 5.0
    with pytest.raises(RuntimeError, match="--jobs"):
        fleet.rate(1, began, began)


def test_a_system_that_returns_other_counts_is_refused() -> None:
    clock = FakeClock()
    cheat: list[System] = [FakeSystem("tokenmill async", clock, 0.01, surplus=-1)]
    with pytest.raises(RuntimeError, match="returned 4032 tokens instead of 4096"):
        measure(cheat, [uniform(PROMPT_IDS)], 1, clock=clock)


def test_the_rate_is_of_the_median() -> None:
    work = uniform(PROMPT_IDS)
    assert Measured(seconds=[1.0, 4096.0, 2.0]).rate(work) == pytest.approx(2048.0)


def test_results_name_versions_and_command(tmp_path: Path) -> None:
    text, record = report.keep("some", "python -m benchmarks.some", [], {"answer": 42}, tmp_path)
    kept = json.loads(record.read_text(encoding="utf-8"))
    assert kept["command"] == "python -m benchmarks.some"
    assert kept["answer"] == 42
    assert {"cpu", "cores", "python", "torch", "transformers"} <= kept["environment"].keys()
    assert "$ python -m benchmarks.some" in text.read_text(encoding="utf-8")


def test_the_course_of_memory_is_told_at_the_beginning_and_each_tenth() -> None:
    memory = [(done, 100.0 + done / 100) for done in range(5, 1001, 7)]
    shown = fleet.course(memory)
    assert len(shown) == 11
    assert (shown[0], shown[-1]) == (memory[0], memory[-1])
    assert all(abs(done - 100 * number) < 10 for number, (done, _) in enumerate(shown))
    assert fleet.course([(3, 1.0), (3, 2.0)]) == [(3, 1.0)]


def test_late_starts_are_counted_and_the_latest_is_told_in_stages() -> None:
    def start(slot_s: float) -> urgent.Urgent:
        return urgent.Urgent(7000, 0.01, slot_s / 2, slot_s, slot_s + 0.5)

    seconds = [0.01 * number for number in range(1, 99)] + [1.0, 1.01, 2.5]
    typical, late, longest = urgent.told([start(one) for one in reversed(seconds)])
    assert typical == ("start of an urgent job, 101 of them", "0.51 s (99 % within 1.01, longest 2.50)")
    assert late == ("of these after more than 1 s", "2")
    assert longest[1] == (
        "accepted after 0.01 s, claimed after 1.25, in its slot after 2.50, ended after 3.00; "
        "7,000 bulk jobs were done then"
    )


def test_delays_are_told_by_nearest_rank() -> None:
    one = streaming.Delays.of([0.001 * number for number in range(1, 201)])
    assert (one.chunks, round(one.median_ms, 3), round(one.p99_ms), round(one.worst_ms)) == (
        200,
        100.5,
        199,
        200,
    )
    with pytest.raises(RuntimeError, match="Raise --seconds"):
        streaming.Delays.of([])


def test_the_step_benchmark_sees_each_request_to_its_end() -> None:
    run = step_cpu.measure(rows=4, requests=60)
    assert len(run.prepare) == len(run.whole) > 500
    assert 3.5 < run.running <= 4
    assert all(0 < prepare <= whole for prepare, whole in zip(run.prepare, run.whole, strict=True))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], ["benchmarks.compare"]),
        (["steps", "--requests", "3000"], ["benchmarks.step_cpu", "--requests=3000"]),
        (["fleet", "--jobs", "500"], ["benchmarks.fleet", "--jobs=500", "--repetitions=1"]),
        (["fleet", "--gpu"], ["benchmarks.gpu", "--parts=fleet"]),
        (["engine", "--gpu", "--quick"], ["benchmarks.gpu", "--quick"]),
        (["engine", "--gpu", "--works", "32x256"], ["benchmarks.gpu", "--works=32x256"]),
    ],
)
def test_the_command_runs_a_module_in_a_process_of_its_own(
    command: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def run(arguments: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        called.append(arguments)
        return subprocess.CompletedProcess(arguments, 3)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = CliRunner().invoke(bench.app, command)
    assert called == [[sys.executable, "-m", *expected]]
    assert outcome.exit_code == 3


def test_the_engine_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run(arguments: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        called.append(arguments)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = CliRunner().invoke(bench.app, ["engine", "--limit", "16", "--systems", "async,generate"])
    assert outcome.exit_code == 0
    assert {"--limit=16", "--systems=async,generate", "--repetitions=3"} <= set(called[0])


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["engine", "--quick"], "--quick"),
        (["engine", "--json", "x"], "--json"),
        (["engine", "--gpu", "--limit", "3"], "--limit"),
        (["fleet", "--out", "x"], "--out"),
        (["fleet", "--gpu", "--jobs", "500"], "--jobs"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    command: list[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    outcome = CliRunner().invoke(bench.app, command)
    assert outcome.exit_code == 2
    assert option in outcome.output


def test_without_the_repository_it_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "workers" / "cli" / "bench.py"))
    outcome = CliRunner().invoke(bench.app, ["steps"])
    assert isinstance(outcome.exception, ConfigurationError)
    assert "Clone the repository" in str(outcome.exception)
