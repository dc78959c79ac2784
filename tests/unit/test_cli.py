"""The command line without servers: help, options, exit codes, and errors that people can act on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from backend.api import ConfigurationError, RequestError
from models_db import migrate, schema
from workers.cli import app
from workers.cli.common import ExitCode, params_from


def commands_of(part: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """This command and all below it, each with whether it does nothing by itself but lists others."""
    below: dict[str, Any] = getattr(part, "commands", {})
    yield path, bool(below) and part.no_args_is_help
    for name, each in below.items():
        yield from commands_of(each, (*path, name))


COMMANDS = list(commands_of(typer.main.get_command(app)))
DEAD_REDIS = "redis://:hunter2@127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but the test's own."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "BROKER_URL", "DATABASE_URL", "MODEL", "BACKEND"):
        monkeypatch.delenv(f"TOKENMILL_{name}", raising=False)


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    migrate.upgrade(url)
    return url


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize(("command", "group"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_command_teaches_by_example(command: tuple[str, ...], group: bool) -> None:
    done = run(*command, "--help")
    assert done.exit_code == 0
    if not group:
        assert "Example" in done.stdout
        assert f"tokenmill {' '.join(command)}" in done.stdout


def test_version_is_the_packages() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, "tokenmill 0.1.0\n")


def test_commands_that_need_no_model_import_neither_torch_nor_celery() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from workers.cli import app\n"
        "assert CliRunner().invoke(app, ['bulk', 'run', '--help']).exit_code == 0\n"
        "import workers.client, workers.bulk, workers.demo\n"
        "print([name for name in ('torch', 'transformers', 'celery') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bad_settings_are_one_message_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_BROKER_URL", "amqp://somewhere")
    done = run("doctor")
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "TOKENMILL_BROKER_URL" in done.stderr
    assert "Traceback" not in done.output


def test_a_database_that_was_never_migrated_is_named_with_the_command_that_mends_it(tmp_path: Path) -> None:
    done = run("stats", "--database-url", f"sqlite:///{tmp_path / 'empty.db'}")
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "tokenmill db upgrade" in done.stderr


def test_db_commands_go_up_and_down(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    head = schema.head_revision()
    assert run("db", "check", "--database-url", url).exit_code == ExitCode.UNAVAILABLE
    assert f"at revision {head}" in run("db", "upgrade", "--database-url", url).stdout
    assert run("db", "check", "--database-url", url).exit_code == 0
    assert f"database: {head}" in run("db", "current", "--database-url", url).stdout
    assert run("db", "downgrade", "base", "--database-url", url).exit_code == 1  # nobody said yes
    assert run("db", "downgrade", "base", "--yes", "--database-url", url).exit_code == 0
    assert "never migrated" in run("db", "current", "--database-url", url).stdout


def test_submit_without_redis_keeps_the_job_and_says_so(database_url: str) -> None:
    done = run("submit", "hello", "--no-wait", "--broker-url", DEAD_REDIS, "--database-url", database_url)
    assert done.exit_code == 0
    assert "stored but not published" in done.stderr
    assert "hunter2" not in done.output
    job_id = done.stdout.strip()
    shown = json.loads(run("job", "show", job_id, "--json", "--database-url", database_url).stdout)
    assert (shown["state"], shown["published_at"], shown["result"]) == ("queued", None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--no-chat"], "prompt: must not be empty"),
        (["", "--chat"], "prompt: must not be empty"),
        (["hi", "--max-tokens", "0"], "max_tokens: must be"),
        (["hi", "--temperature", "-1"], "temperature: must be"),
        (["hi", "-p", "top_p=1.5"], "top_p: must be"),
        (["hi", "-p", "nonsense"], "--param: must be NAME=VALUE"),
        (["hi", "-p", "max_token=3"], "max_token: unknown field"),
        (["hi", "--model", "other"], "model: is not served here"),
        (["hi", "--no-chat", "--system", "x"], "--system: needs the chat template"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_stored(
    arguments: list[str], message: str, database_url: str
) -> None:
    done = run("submit", *arguments, "--no-wait", "--database-url", database_url, "--broker-url", DEAD_REDIS)
    assert done.exit_code == ExitCode.USAGE
    assert message in done.stderr
    assert "No job" in run("stats", "--database-url", database_url).stdout


def test_cancel_ends_a_queued_job_and_names_an_unknown_one(database_url: str) -> None:
    submitted = run("submit", "hi", "--no-wait", "--broker-url", DEAD_REDIS, "--database-url", database_url)
    job_id = submitted.stdout.strip()
    done = run("cancel", job_id, "nobody", "--database-url", database_url)
    assert done.exit_code == ExitCode.USAGE
    assert f"{job_id}: cancelled" in done.stdout
    assert "there is no job nobody" in done.stderr


def test_waiting_ends_with_its_own_status_when_the_time_is_over(database_url: str) -> None:
    done = run(
        "submit", "hi", "--timeout", "0.05", "--broker-url", DEAD_REDIS, "--database-url", database_url
    )
    assert done.exit_code == ExitCode.TIMEOUT
    assert "is still queued after 0.05 s" in done.stderr


def test_a_long_wait_is_explained(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cli.submit._wait.__defaults__", (0.05,))
    arguments = ["--timeout", "0.1", "--broker-url", DEAD_REDIS, "--database-url", database_url]
    done = run("submit", "hi", *arguments)
    assert done.exit_code == ExitCode.TIMEOUT
    assert "is still queued. Does a worker run? See: tokenmill doctor" in done.stderr


def test_a_batch_that_nobody_works_on_is_explained(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.bulk_watch import BatchWatch
    from workers.cli import bulk_work

    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "x"}\n')
    monkeypatch.setattr(bulk_work, "_PATIENCE_S", 0.0)

    looks: list[str] = []
    look = BatchWatch.look

    def stop_at_the_second_look(self: BatchWatch, batch_id: str, *more: float) -> object:
        looks.append(batch_id)
        if len(looks) == 2:
            raise KeyboardInterrupt
        return look(self, batch_id, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchWatch, "look", stop_at_the_second_look)
    arguments = ["--database-url", database_url, "--broker-url", DEAD_REDIS]
    done = run("bulk", "run", str(source), "-o", str(tmp_path / "out.jsonl"), *arguments)
    assert done.exit_code == ExitCode.INTERRUPTED
    assert "No worker runs" in done.stderr
    assert "tokenmill bulk resume" in done.stderr


def test_stats_and_batches_of_an_empty_database(database_url: str) -> None:
    assert "No job has ended" in run("stats", "--database-url", database_url).stdout
    assert json.loads(run("stats", "--by", "model", "--json", "--database-url", database_url).stdout) == []
    assert "No batch" in run("bulk", "status", "--database-url", database_url).stdout
    unknown = run("bulk", "status", "nothing", "--database-url", database_url)
    assert (unknown.exit_code, "there is no batch nothing" in unknown.stderr) == (ExitCode.USAGE, True)


def test_prune_counts_before_it_deletes(database_url: str) -> None:
    done = run("db", "prune", "--older-than", "90d", "--dry-run", "--database-url", database_url)
    assert "would delete 0 jobs" in done.stdout


def test_doctor_names_what_is_broken_and_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    done = run(
        "doctor", "--json", "--broker-url", DEAD_REDIS, "--database-url", url, "--model", "nowhere/x/y"
    )
    assert done.exit_code == ExitCode.FAILED
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["redis"]["health"] == "broken"
    assert found["schema"]["fix"] == "tokenmill db upgrade"
    assert found["model"]["health"] == "broken"
    assert "hunter2" not in done.output


def test_doctor_finds_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setenv("TOKENMILL_BROKR_URL", "redis://elsewhere/0")
    done = run("doctor", "--broker-url", DEAD_REDIS, "--database-url", database_url)
    assert "TOKENMILL_BROKR_URL is no setting" in done.stdout
    assert "Did you mean TOKENMILL_BROKER_URL?" in done.stdout


@pytest.mark.parametrize("direction", ["upgrade", "downgrade"])
def test_an_unknown_revision_is_named_with_the_known_ones(direction: str, database_url: str) -> None:
    done = run("db", direction, "nonsense", "--database-url", database_url)
    assert done.exit_code == ExitCode.UNAVAILABLE  # and nobody is asked first
    assert "revision 'nonsense'" in done.stderr
    assert schema.head_revision() in done.stderr


def test_a_broker_url_with_an_unknown_option_is_named(database_url: str) -> None:
    done = run("submit", "x", "--broker-url", f"{DEAD_REDIS}?speed=9", "--database-url", database_url)
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "TOKENMILL_BROKER_URL" in done.stderr
    assert "speed" in done.stderr


def test_a_demo_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("demo", "--backend", "echo", "--folder", str(tmp_path / "file" / "folder"))
    assert done.exit_code == ExitCode.USAGE
    assert "folder cannot be used (Not a directory)" in done.stderr


def test_bulk_refuses_bad_input_before_it_starts(tmp_path: Path, database_url: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "x"}\n{"custom_id": "a", "prompt": "y"}\n{"prompt": \n')
    arguments = ["--database-url", database_url, "--broker-url", DEAD_REDIS]
    done = run("bulk", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--refuse-bad", *arguments)
    assert done.exit_code == ExitCode.USAGE
    assert "in.jsonl:2: custom_id: was used in line 1" in done.stderr
    assert "in.jsonl:3: is not valid JSON" in done.stderr
    assert "No batch" in run("bulk", "status", "--database-url", database_url).stdout
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("missing.jsonl", "out.jsonl", "missing.jsonl cannot be read"),
        ("good.jsonl.zst", "out.jsonl", "is compressed by zstd. Unpack it"),
        ("wide.jsonl", "out.jsonl", "is UTF-16. Re-encode it as UTF-8"),
        ("broken.jsonl.gz", "out.jsonl", "is a broken gzip file"),
        ("good.jsonl", "out.parquet", "would hold JSON lines under a name that says otherwise"),
        ("good.jsonl", "no/such/folder/out.jsonl", "does not exist"),
        ("good.jsonl", "good.jsonl", "would overwrite the input"),
        ("good.jsonl", ".", "is a folder"),
        ("good.jsonl", "/dev/null", "is no plain file"),
        ("good.jsonl", "-", "would be standard output"),
    ],
)
def test_bulk_checks_its_files_first(
    source: str, output: str, message: str, tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "good.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd...")
    (tmp_path / "wide.jsonl").write_text("{}", encoding="utf-16")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(bytes(range(256)) * 100)[:-20])
    (tmp_path / "good.jsonl").write_text('{"custom_id": "a", "prompt": "x"}\n')
    arguments = ["--database-url", database_url, "--broker-url", DEAD_REDIS]
    done = run("bulk", "run", source, "-o", output, *arguments)
    assert done.exit_code == ExitCode.USAGE
    assert message in done.stderr


def test_params_are_json_where_they_can_be() -> None:
    assert params_from(["top_p=0.9", "stop=END", 'stop=["a","b"]', "tenant=a=b"]) == {
        "top_p": 0.9,
        "stop": ["a", "b"],
        "tenant": "a=b",
    }


def test_errors_of_the_configuration_are_not_usage_errors() -> None:
    from workers.cli.common import exit_code_for

    assert exit_code_for(ConfigurationError("x")) is ExitCode.UNAVAILABLE
    assert exit_code_for(RequestError("x")) is ExitCode.USAGE


def test_serve_without_a_key_listens_on_this_machine_alone(database_url: str) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.com"):
        done = run("serve", "--host", host, "--database-url", database_url)
        assert done.exit_code == ExitCode.UNAVAILABLE
        assert f"error: --host {host}: anybody who reaches this address" in done.stderr
        assert "tokenmill keys create TENANT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "error: TENANT: must not be empty. Give at least one character\n"),
        (["acme", "--name", ""], "error: --name: must not be empty. Give at least one character\n"),
        (["x" * 300], "error: TENANT: has 300 characters, more than the 255 that fit. Shorten it\n"),
    ],
)
def test_a_key_for_nobody_is_refused_by_the_argument_s_name(
    arguments: list[str], message: str, database_url: str
) -> None:
    done = run("keys", "create", *arguments, "--database-url", database_url)
    assert (done.exit_code, done.stderr) == (ExitCode.USAGE, message)


@pytest.mark.parametrize(
    "command",
    [
        "job show",
        "cancel",
        "bulk status",
        "bulk cancel",
        "callbacks retry",
        "callbacks list",
        "keys revoke",
        "keys create",
    ],
)
def test_an_argument_that_is_no_utf_8_is_a_wrong_argument(command: str, database_url: str) -> None:
    done = run(*command.split(), "\udcff", "--database-url", database_url)
    assert done.exit_code == ExitCode.USAGE
    assert done.stderr.startswith("error: ")
