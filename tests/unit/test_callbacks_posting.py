"""One request: to the address that was checked, with TLS for the name, no redirect, and within limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpcore2
import pytest

from backend.api import ConfigurationError
from tests.receiver import Receiver, Reply, make_certificate
from workers.callbacks.addresses import resolve
from workers.callbacks.posting import MOST_ADDRESSES, CheckedNetwork, Poster
from workers.callbacks.schedule import Answer
from workers.callbacks.urls import CallbackUrl

NAME = "hooks.example.com"


def resolver(*answers: Sequence[str]) -> tuple[Callable[..., Any], list[str]]:
    """Gives these answers in turn, the last one for ever; and the names that were asked for."""
    asked: list[str] = []
    left = list(answers)

    async def look_up(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return left.pop(0) if len(left) > 1 else left[0]

    return look_up, asked


def post(
    url: CallbackUrl,
    *answers: Sequence[str],
    allow_private: bool = True,
    timeout_s: float = 5.0,
    ca_file: Path | None = None,
    times: int = 1,
) -> tuple[list[Answer], list[str]]:
    look_up, asked = resolver(*(answers or (["127.0.0.1"],)))
    network = CheckedNetwork(allow_private=allow_private, resolve=look_up)
    poster = Poster(network, timeout_s=timeout_s, ca_file=ca_file)

    async def all_of_them() -> list[Answer]:
        return [await poster.post(url, {"webhook-id": "msg_1"}, b'{"a":1}') for _ in range(times)]

    return asyncio.run(all_of_them()), asked


def plain(receiver: Receiver, target: str = "/hook?token=x", host: str = NAME) -> CallbackUrl:
    return CallbackUrl("http", host, receiver.port, target)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def test_a_request_arrives_as_it_was_meant(receiver: Receiver) -> None:
    (answer,), asked = post(plain(receiver))
    assert (answer.status, asked) == (204, [NAME])
    (request,) = receiver.received
    assert (request.path, request.body) == ("/hook?token=x", b'{"a":1}')
    assert request.headers["host"] == f"{NAME}:{receiver.port}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == "msg_1"


def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (answer,), _ = post(plain(receiver))
    assert answer.status == 204


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["10.0.0.1"]]
)
def test_nothing_is_sent_to_an_address_that_is_not_public(receiver: Receiver, found: list[str]) -> None:
    (answer,), _ = post(plain(receiver), found, allow_private=False)
    assert answer.refused
    assert f"{NAME} resolves to" in answer.error
    assert receiver.received == []


def test_the_address_that_was_checked_is_the_one_connected_to(receiver: Receiver) -> None:
    """DNS rebinding: the second answer is another one. It is neither asked for nor used within a request."""
    (first, second), asked = post(plain(receiver), ["127.0.0.1"], ["169.254.169.254"], times=2)
    assert first.status == 204
    assert second.refused, "a new request is checked anew"
    assert asked == [NAME, NAME]
    assert len(receiver.received) == 1


def test_the_next_address_is_tried_when_the_first_does_not_answer(receiver: Receiver) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        (answer,), _ = post(plain(receiver), ["127.0.0.2", "127.0.0.1"])
    assert answer.status == 204


class Leap(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def leap(timeout: float | None = None) -> Any:
            ready = select(0)
            if not ready:
                self.now += timeout or 0.0
            return ready

        self._selector.select = leap  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("silent", [1, 3, 4])
def test_addresses_that_do_not_answer_cost_one_timeout_in_all(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its share, so that the last one, which does answer, is come to."""
    shares: list[float] = []

    class Network(httpcore2.AsyncNetworkBackend):
        async def connect_tcp(self, host: str, port: int, timeout: float | None = None, *rest: Any) -> Any:
            assert timeout is not None
            shares.append(timeout)
            if host == "10.0.0.9":
                return httpcore2.AsyncMockStream([])
            await asyncio.sleep(timeout)
            raise httpcore2.ConnectTimeout("silent")

    async def slow(host: str, port: int) -> list[str]:
        await asyncio.sleep(0.1)  # the look-up is within the timeout, too
        return [*(f"10.0.0.{number}" for number in range(1, silent + 1)), "10.0.0.9"]

    network = CheckedNetwork(allow_private=True, resolve=slow, inner=Network())
    connect = network.connect_tcp(NAME, 443, timeout=0.5)
    loop = Leap()
    monkeypatch.setattr("workers.callbacks.posting.time", SimpleNamespace(monotonic=loop.time))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        if silent < MOST_ADDRESSES:
            assert runner.run(connect) is not None
        else:
            with pytest.raises(httpcore2.ConnectTimeout, match="silent"):
                runner.run(connect)
        assert loop.now <= 0.5 + 1e-6, "not 0.5 s for each"
    assert len(shares) == min(silent + 1, MOST_ADDRESSES)
    assert sum(shares[:-1]) + 0.1 <= 0.5


def test_a_redirect_is_an_answer_and_not_followed(receiver: Receiver) -> None:
    with Receiver(Reply(302, {"location": receiver.url("/elsewhere")})) as redirecting:
        (answer,), _ = post(plain(redirecting))
    assert answer.status == 302
    assert receiver.received == []


def test_a_retry_after_that_means_nothing_spoils_no_answer() -> None:
    with Receiver(Reply(204, {"Retry-After": "Sun, 01 Mar 2026 12:00:00 +9999999999999999"})) as odd:
        (answer,), _ = post(plain(odd))
    assert answer == Answer(204)


def test_retry_after_is_read() -> None:
    with Receiver(Reply(503, {"Retry-After": "17"})) as busy:
        (answer,), _ = post(plain(busy))
    assert (answer.status, answer.retry_after_s) == (503, 17)


def test_a_receiver_that_says_nothing_costs_no_more_than_the_timeout() -> None:
    enough, spoke = threading.Event(), threading.Event()
    with Receiver(Reply(before=lambda _: (enough.wait(60), spoke.set()))) as slow:
        (answer,), _ = post(plain(slow), timeout_s=0.3)
        assert not spoke.is_set(), "it would have said something after a minute"
        enough.set()
    assert answer.status is None


def test_one_that_drips_its_answer_costs_no_more_either() -> None:
    """Each read is quick, so that only a limit for the whole ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
                    while not stop.wait(0.05):
                        connection.sendall(b"x")
                except OSError:
                    pass

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        url = CallbackUrl("http", NAME, server.getsockname()[1], "/")
        (answer,), _ = post(url, timeout_s=0.5)
        stop.set()
        thread.join(20)
    assert answer == Answer(error="no answer within 0.5 s")


def test_a_long_answer_is_not_read_to_its_end() -> None:
    with Receiver(Reply(200, body=b"x" * 50_000_000)) as verbose:
        (answer,), _ = post(plain(verbose))
    assert answer.status == 200


@pytest.mark.parametrize(("timeout_s", "then"), [(60.0, "wait"), (1.5, "wait"), (60.0, "break")])
def test_an_answer_counts_when_its_head_is_there(timeout_s: float, then: str) -> None:
    """Or a receiver that has taken the event would get it again."""
    stop, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")
                if then == "wait":
                    stop.wait(40)
                    over.set()

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        url = CallbackUrl("http", NAME, server.getsockname()[1], "/")
        (answer,), _ = post(url, timeout_s=timeout_s)
        assert not over.is_set(), "the body is not waited for"
        stop.set()
        thread.join(20)
    assert answer == Answer(200)


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x" * 300_000])
def test_what_is_no_http_is_an_error_on_one_line(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                with suppress(OSError):
                    connection.sendall(said)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        (answer,), _ = post(CallbackUrl("http", NAME, server.getsockname()[1], "/"))
        thread.join(20)
    assert answer.status is None
    assert answer.error
    assert "\n" not in answer.error


def test_nobody_there_and_no_such_name_are_errors_with_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (answer,), _ = post(CallbackUrl("http", NAME, port, "/"))
    assert (answer.status, answer.refused, bool(answer.error)) == (None, False, True)

    async def fails(host: str, port: int) -> list[str]:
        raise socket.gaierror("no such name")

    poster = Poster(CheckedNetwork(resolve=fails), timeout_s=1)
    answer = asyncio.run(poster.post(CallbackUrl("https", NAME, 443, "/"), {}, b""))
    assert f"{NAME} cannot be looked up" in answer.error
    assert not answer.refused, "names come back"


def test_a_look_up_that_hangs_costs_the_timeout_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    enough, over = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        enough.wait(60)
        over.set()
        return []

    monkeypatch.setattr("socket.getaddrinfo", hang)
    poster = Poster(CheckedNetwork(), timeout_s=0.2)
    answer = asyncio.run(poster.post(CallbackUrl("https", NAME, 443, "/"), {}, b""))
    assert not over.is_set()
    enough.set()
    assert answer.status is None


def test_the_systems_resolver_is_asked() -> None:
    found = asyncio.run(resolve("localhost", 80))
    assert set(found) <= {"127.0.0.1", "::1"}
    assert found
    with pytest.raises(OSError):
        asyncio.run(resolve("no-such-name.invalid", 80))


# ----------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), NAME)


def test_the_certificate_must_be_of_the_name_although_an_address_is_connected_to(
    certificate: tuple[Path, Path],
) -> None:
    with Receiver(certificate=certificate) as receiver:
        right = CallbackUrl("https", NAME, receiver.port, "/")
        (answer,), _ = post(right, ca_file=certificate[0])
        assert answer == Answer(204)
        wrong = CallbackUrl("https", "other.example.com", receiver.port, "/")
        (answer,), _ = post(wrong, ca_file=certificate[0])
        assert answer.status is None
        assert "certificate" in answer.error.lower()
        assert len(receiver.received) == 1


def test_a_certificate_that_nobody_signed_is_refused(certificate: tuple[Path, Path]) -> None:
    with Receiver(certificate=certificate) as receiver:
        (answer,), _ = post(CallbackUrl("https", NAME, receiver.port, "/"))
        assert "certificate" in answer.error.lower()
        assert receiver.received == []


def test_a_file_of_certificates_that_is_none_is_named(tmp_path: Path) -> None:
    for content in (None, "nonsense"):
        path = tmp_path / "ca.pem"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigurationError, match="TOKENMILL_CALLBACK_CA_FILE"):
            Poster(CheckedNetwork(), timeout_s=1, ca_file=path)
