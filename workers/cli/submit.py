"""``tokenmill submit``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.api import RequestError
from workers.cli.common import (
    BrokerOption,
    ChatOption,
    DatabaseOption,
    JsonOption,
    ModelOption,
    params_from,
    settings_from,
)
from workers.cli.durations import waiting_s

if TYPE_CHECKING:
    from models_db.jobs import StoredResult
    from workers.client import JobHandle

_PATIENCE_S = 5.0


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(submit)


def submit(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ],
    model: ModelOption = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most new tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy (the default).")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before the prompt.", show_default=False)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="Any other field of the payload, NAME=VALUE; may be repeated."),
    ] = None,
    chat: ChatOption = True,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key gives the same job.", show_default=False),
    ] = None,
    callback_url: Annotated[
        str | None,
        typer.Option(
            "--callback-url",
            help="Told by a signed request when the job has ended; its host must be in TOKENMILL_CALLBACK_HOSTS.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer and print it.")] = True,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Wait at most so many seconds.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Submit one prompt and print the answer, or with --no-wait the job's id.

    [bold]Examples[/bold]

      tokenmill submit "What is the capital of Portugal?"

      tokenmill submit "Once upon a time" --no-chat --max-tokens 100 --temperature 0.8 -p top_p=0.9

      git diff | tokenmill submit - --system "Write a commit message." --max-tokens 60

      id=$(tokenmill submit "Tell me a story." --no-wait); tokenmill job show $id
    """
    settings = settings_from(broker_url=broker_url, database_url=database_url)
    text = sys.stdin.read() if prompt == "-" else prompt
    fields: dict[str, Any] = params_from(param or [])
    given = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "callback_url": callback_url,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if key is not None:
        fields["idempotency_key"] = key
    if timeout is not None:
        waiting_s(timeout, "--timeout")
    if system is not None and not chat:
        raise RequestError("needs the chat template", field="--system", fix="Leave --no-chat away")
    if chat and text:
        turns = [{"role": "system", "content": system}] if system is not None else []
        fields["messages"] = [*turns, {"role": "user", "content": text}]
    else:
        fields["prompt"] = text

    from workers.client import Client

    with Client(settings) as client:
        job = client.submit(**fields)
        if not job.published:
            typer.echo("Redis is away: the job is stored but not published yet.", err=True)
        if not wait:
            typer.echo(json.dumps(_handle(job)) if as_json else job.id)
            return
        try:
            result = _wait(job, timeout)
        except KeyboardInterrupt:
            typer.echo(f"job {job.id} goes on. Cancel it: tokenmill cancel {job.id}", err=True)
            raise
        typer.echo(
            json.dumps({"job_id": job.id} | asdict(result), ensure_ascii=False) if as_json else result.text
        )


def _wait(job: JobHandle, timeout: float | None, patience_s: float = _PATIENCE_S) -> StoredResult:
    """Wait, and say after a while why nothing happens."""
    from models_db.tables import JobState
    from workers.client import WaitTimeoutError

    if timeout is not None and timeout <= patience_s:
        return job.wait(timeout)
    try:
        return job.wait(patience_s)
    except WaitTimeoutError as error:
        if error.status.state is JobState.QUEUED:
            typer.echo(f"job {job.id} is still queued. Does a worker run? See: tokenmill doctor", err=True)
    return job.wait(None if timeout is None else timeout - patience_s)


def _handle(job: Any) -> dict[str, Any]:
    return {"job_id": job.id, "created": job.created, "published": job.published}
