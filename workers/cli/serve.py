"""``tokenmill serve`` and ``tokenmill keys``: the OpenAI-compatible doorway, and who may use it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from backend.api import ConfigurationError, RequestError
from workers.cli.common import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    ModelOption,
    console,
    database,
    group,
    settings_from,
)
from workers.cli.durations import waiting_s

keys_app = group(help="API keys of [bold]tokenmill serve[/bold]: each lets one tenant in.")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(serve)
    app.add_typer(keys_app, name="keys")


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine need keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Longest wait for one answer, in seconds.")
    ] = 600.0,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
    model: ModelOption = None,
) -> None:
    """Serve the OpenAI API over the fleet: chat, completions, models, files and batches, streaming too.

    Any OpenAI client works with it:

      client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="tm_…")
      client.chat.completions.create(model="smollm2", messages=[…])

    On this machine alone no key is asked for where none existed when it started: after the first one (tokenmill keys
    create) start it again. To listen on another address there must be a key. Put a proxy with TLS before it. Needs
    the extra: pip install 'tokenmill\\[serve]'

    [bold]Examples[/bold]

      tokenmill serve --model smollm2

      tokenmill serve --host 0.0.0.0 --port 8080
    """
    from workers.serve.auth import is_loopback

    waiting_s(timeout_s, "--timeout")
    settings = settings_from(broker_url=broker_url, database_url=database_url, model=model)
    with database(settings) as engine:
        from models_db import keys
        from models_db.session import reading

        with reading(engine) as conn:
            guarded = keys.any_active(conn)
    if not guarded and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host}: anybody who reaches this address could use the service, and there is no API key. "
            "Make one with `tokenmill keys create TENANT`, or listen on 127.0.0.1"
        )
    try:
        import uvicorn

        from workers.serve.app import make_app
    except ImportError as error:
        raise ConfigurationError(
            f"tokenmill serve needs the package {error.name}. Install it: pip install 'tokenmill[serve]'"
        ) from None
    app = make_app(settings, open_to_all=not guarded, timeout_s=timeout_s)
    config = uvicorn.Config(app, host=host, port=port, log_level=settings.log_level, access_log=False)
    who = "API keys are asked for" if guarded else "open to this machine, without keys"
    typer.echo(f"tokenmill serve: models {', '.join(settings.accepted_models)}; {who}", err=True)
    uvicorn.Server(config).run()


@keys_app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whom the key lets in; jobs, files and batches are theirs.")],
    name: Annotated[str, typer.Option(help="What it is for, for people.")] = "default",
    database_url: DatabaseOption = None,
) -> None:
    """Make a key and print it. It is stored as a hash only: this is the one time it is seen.

    [bold]Example[/bold]

      tokenmill keys create acme --name "nightly summaries"
    """
    from models_db import keys
    from models_db.errors import InvalidValueError
    from models_db.session import transaction

    with database(settings_from(database_url=database_url)) as engine:
        try:
            _, key = transaction(engine, lambda conn: keys.create_key(conn, tenant=tenant, name=name))
        except InvalidValueError as error:
            option = "--name" if error.field == "name" else "TENANT"
            fix = "Give at least one character" if not (name and tenant) else error.fix
            raise RequestError(error.message, field=option, fix=fix) from None
    typer.echo(key)


@keys_app.command("list")
def list_all(database_url: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show the keys that exist, without their secrets.

    [bold]Example[/bold]

      tokenmill keys list --json
    """
    from models_db import keys
    from models_db.session import reading

    with database(settings_from(database_url=database_url)) as engine, reading(engine) as conn:
        found = keys.list_keys(conn)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "id": key.id,
                "tenant": key.tenant,
                "name": key.name,
                "created_at": key.created_at.isoformat(),
                "revoked_at": None if key.revoked_at is None else key.revoked_at.isoformat(),
            }
            for key in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table("id", "tenant", "name", "created", "revoked")
    for key in found:
        revoked = "" if key.revoked_at is None else f"{key.revoked_at:%Y-%m-%d %H:%M}"
        table.add_row(key.id, key.tenant, key.name, f"{key.created_at:%Y-%m-%d %H:%M}", revoked)
    console().print(table)


@keys_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As tokenmill keys list shows it.")],
    database_url: DatabaseOption = None,
) -> None:
    """Let nobody in with this key any more. Running servers know within ten seconds.

    [bold]Example[/bold]

      tokenmill keys revoke 1f2e3d4c
    """
    from models_db import keys
    from models_db.session import transaction

    with database(settings_from(database_url=database_url)) as engine:
        done = transaction(engine, lambda conn: keys.revoke_key(conn, key_id))
    if not done:
        raise RequestError(
            "is no active key", field="ID", value=key_id, fix="See `tokenmill keys list` for those there are"
        )
    typer.echo(f"revoked {key_id}")
