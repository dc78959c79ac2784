"""A TCP proxy that can cut, refuse, freeze and hold what goes through it, like a bad network."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, as a dead host does


@dataclass(eq=False)
class _Pair:
    """One client's connection and the one to the server behind it."""

    client: socket.socket
    server: socket.socket
    unsent: dict[socket.socket, bytearray] = field(default_factory=dict)
    held: bool = False
    stranded: bool = False

    def other(self, one: socket.socket) -> socket.socket:
        return self.server if one is self.client else self.client

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()


class Proxy:
    """Forwards to a port of this host, or to a socket in the file system, from a port of its own, until ``close``.

    ``cut`` resets every connection; ``refuse`` also resets each new one until ``forward``; ``freeze`` leaves
    connections open and forwards nothing until ``forward``; ``strand`` does so for ever to those that are open now, as
    when a host vanishes or a router forgets them; ``hold`` stops the first connection whose client sends
    the given bytes, before the server sees them, until ``release``.
    """

    def __init__(self, target: int | str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._pairs: set[_Pair] = set()
        self._refusing = False
        self._frozen = False
        self._marker: bytes | None = None
        self._holding = threading.Event()
        self._closing = False
        self._waker, self._alarm = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------- from other threads

    @property
    def connections(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._pairs)

    def cut(self) -> int:
        """Reset every connection; returns how many there were."""
        with self._lock:
            pairs = list(self._pairs)
            for pair in pairs:
                self._drop(pair)
        self._wake()
        return len(pairs)

    def refuse(self) -> None:
        """Reset every connection and each new one."""
        self._refusing = True
        self.cut()

    def freeze(self) -> None:
        """Forward nothing; nobody is told."""
        self._frozen = True
        self._wake()

    def strand(self) -> int:
        """Forward nothing any more on the connections that are open now; returns how many there were."""
        with self._lock:
            for pair in self._pairs:
                pair.stranded = True
            count = len(self._pairs)
        self._wake()
        return count

    def forward(self) -> None:
        """End ``refuse`` and ``freeze``."""
        self._refusing = self._frozen = False
        self._wake()

    def hold(self, marker: bytes) -> threading.Event:
        """Hold the next connection whose client sends ``marker``; the event tells that it is held."""
        self._holding.clear()
        self._marker = marker
        return self._holding

    def release(self) -> None:
        """Send what is held on its way, and hold nothing more."""
        with self._lock:
            self._marker = None
            for pair in self._pairs:
                pair.held = False
        self._wake()

    def close(self) -> None:
        """End the thread and every connection."""
        self._closing = True
        self._wake()
        self._thread.join(10)

    # --------------------------------------------------------------------------------------------- on the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._alarm.send(b"x")

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select()
            with self._lock:
                for key, events in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._waker:
                        self._waker.recv(_CHUNK)
                        for pair in list(self._pairs):
                            self._watch(pair)
                    elif key.data in self._pairs:
                        self._move(key.data, key.fileobj, events)  # type: ignore[arg-type]
        self.cut()
        for end in (self._listener, self._waker, self._alarm):
            end.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if self._refusing:
                raise ConnectionRefusedError
            server = self._connect()
        except OSError:
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        pair = _Pair(client, server)
        for end in (client, server):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
            pair.unsent[end] = bytearray()
        self._pairs.add(pair)
        self._watch(pair)

    def _connect(self) -> socket.socket:
        if isinstance(self.target, int):
            return socket.create_connection(("127.0.0.1", self.target), 5)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self.target)
        except OSError:
            server.close()
            raise
        return server

    def _watch(self, pair: _Pair) -> None:
        """Wait for what the pair can do now."""
        for end in (pair.client, pair.server):
            events = 0
            if not self._frozen and not pair.stranded:
                if not pair.unsent[pair.other(end)]:
                    events |= selectors.EVENT_READ
                if pair.unsent[end] and not (pair.held and end is pair.server):
                    events |= selectors.EVENT_WRITE
            known = self._selector.get_map().get(end)
            if known is not None and not events:
                self._selector.unregister(end)
            elif known is None and events:
                self._selector.register(end, events, pair)
            elif known is not None and known.events != events:
                self._selector.modify(end, events, pair)

    def _move(self, pair: _Pair, end: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = end.recv(_CHUNK)
                if not data:
                    raise ConnectionResetError
                if end is pair.client and self._marker is not None and self._marker in data:
                    pair.held = True
                    self._marker = None
                    self._holding.set()
                pair.unsent[pair.other(end)] += data
            for target in (pair.client, pair.server):
                if pair.unsent[target] and not (pair.held and target is pair.server):
                    with contextlib.suppress(BlockingIOError):
                        del pair.unsent[target][: target.send(pair.unsent[target])]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(pair)
            return
        self._watch(pair)

    def _drop(self, pair: _Pair) -> None:
        if pair not in self._pairs:
            return
        self._pairs.discard(pair)
        for end in (pair.client, pair.server):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        pair.close()
