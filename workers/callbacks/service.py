"""A sender as a thread beside a worker's processes, or as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress

from sqlalchemy import Engine

from backend.api import ConfigurationError
from models_db.session import make_engine
from workers.callbacks.sender import CallbackSender, SenderLimits
from workers.callbacks.urls import CallbackRules
from workers.settings import Settings

log = logging.getLogger("tokenmill.callbacks")

# A sender that freezes within a transaction keeps its callbacks' locks for no longer than this.
IDLE_IN_TRANSACTION_S = 30.0
AT_ONCE = 64  # requests of a sender, at least
HOSTS_AT_ONCE = 4  # so many hosts can have all the requests that one host may have


def make_sender(settings: Settings, engine: Engine) -> CallbackSender:
    """A sender as the settings say.

    Raises:
        ConfigurationError: no host is allowed, there is no secret, or the HTTP library is not installed.
    """
    if not settings.callback_hosts:
        raise ConfigurationError(
            "callback_hosts (TOKENMILL_CALLBACK_HOSTS): names no host, so there is nobody to send callbacks to. "
            "List the receivers: hooks.example.com,.internal.example.com"
        )
    if not settings.callback_secrets:
        raise ConfigurationError(
            "callback_secrets (TOKENMILL_CALLBACK_SECRETS): is not set, and callbacks are sent signed only. Make a "
            "secret with `tokenmill callbacks secret`, or set TOKENMILL_CALLBACK_SENDER=false where another host sends"
        )
    from workers.callbacks.posting import CheckedNetwork, Poster

    rules = CallbackRules.of(settings)
    timeout_s = settings.callback_timeout_s
    poster = Poster(
        CheckedNetwork(allow_private=rules.allow_private),
        timeout_s=timeout_s,
        ca_file=settings.callback_ca_file,
    )
    per_host = settings.callback_host_connections
    limits = SenderLimits(
        per_host=per_host,
        in_all=max(AT_ONCE, HOSTS_AT_ONCE * per_host),
        timeout_s=timeout_s,
        max_age_s=settings.callback_max_age_s,
    )
    secrets = [secret.get_secret_value() for secret in settings.callback_secrets]
    return CallbackSender(engine, rules, secrets, poster, limits)


class SenderThread:
    """A sender on an event loop in a thread of its own."""

    def __init__(self, sender: CallbackSender, engine: Engine) -> None:
        self._sender = sender
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Send nothing more, and wait a little for what is under way."""
        with suppress(RuntimeError):  # the loop is closed when the sender has died
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._engine.dispose()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._sender.run(self._stop))
        except Exception:
            log.exception("the sender of callbacks died; other hosts go on, or restart this worker")


def start_sender(settings: Settings) -> SenderThread | None:
    """The sender that belongs to ``tokenmill worker``; none where the settings want none.

    Raises:
        ConfigurationError: as ``make_sender``.
    """
    if not settings.callback_hosts or not settings.callback_sender:
        return None
    engine = make_engine(settings.database_url, pool_size=3, idle_in_transaction_s=IDLE_IN_TRANSACTION_S)
    thread = SenderThread(make_sender(settings, engine), engine)
    thread.start()
    return thread


def run_sender(
    settings: Settings, engine: Engine, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)
) -> CallbackSender:
    """Send until one of the signals comes. Must be called on the main thread."""
    sender = make_sender(settings, engine)

    async def main() -> None:
        stop = asyncio.Event()
        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await sender.run(stop)

    asyncio.run(main())
    return sender


def log_to_terminal(level: str) -> None:
    """Show what a sender says, where nothing else has set logging up."""
    logging.basicConfig(
        level=level.upper(), format="[%(asctime)s: %(levelname)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
