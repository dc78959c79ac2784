"""Kombu's Redis transport: leases on Redis's own clock, a limit for bulk, nothing unreadable thrown away.

Kombu notes when a delivery was received, and looks for those that were received too long ago, by the clock of the
worker that does it. With one wrong clock live jobs would be delivered again all the time.
"""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from celery.utils.log import get_logger
from kombu import Connection
from kombu.transport import redis as plain
from kombu.transport import virtual
from kombu.utils.json import dumps

from workers.fetching import UNREADABLE, FetchingChannel, GatheringQoS
from workers.payload import BULK_PRIORITY
from workers.refusing_redis import noticing_refusals

logger = get_logger(__name__)

_SHORT_POP_S = 0.1  # where a pop cannot be ended early

DEAD_LETTERS_KEY = "tokenmill.dead-letters"

# Both begin with a write that needs no memory: what follows it in a script is done in a full Redis, too. A message
# that moves from one key to another makes Redis no fuller.
_RECEIVE = """
local now = redis.call('TIME')
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
"""
_PUT_BACK = """
redis.call('LTRIM', KEYS[1], 0, -1)
redis.call('RPUSH', KEYS[1], ARGV[1])
"""

_in_hand: list[tuple[bytes, bytes]] = []
"""Messages that were popped and neither recorded nor put back yet, with their lists; of the main thread."""


@dataclass(frozen=True, slots=True)
class Credit:
    """How many bulk deliveries a channel may hold.

    At ``most`` it takes only more urgent ones, until no more than ``resume`` are left. Below ``least`` bulk goes
    first, so that a flood of urgent jobs does not starve it.
    """

    most: int
    resume: int
    least: int

    @classmethod
    def of(cls, slots: int, headroom: int, least_share: float) -> Credit:
        """For an engine with this many slots, of which bulk keeps a share."""
        most = slots + headroom
        return cls(most, most - max(1, headroom // 4), math.ceil(slots * least_share))


class LeaseQoS(GatheringQoS):
    """Scores of unacknowledged deliveries are seconds on Redis's clock; bulk deliveries are counted apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bulk: set[str] = set()
        self._quick_ack = self._on_acknowledged

    @property
    def bulk(self) -> int:
        """Unacknowledged bulk deliveries."""
        return len(self._bulk)

    def _on_acknowledged(self, delivery_tag: str) -> None:
        self._dirty.add(delivery_tag)
        if delivery_tag in self._bulk:
            self._bulk.remove(delivery_tag)
            self.channel.on_credit()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a delivery as received."""
        if delivery_tag in self.recorded:
            self.recorded.discard(delivery_tag)
        else:
            info = message.delivery_info
            entry = dumps([message._raw, info["exchange"], info["routing_key"]])
            with self.channel.conn_or_acquire() as client:
                client.eval(_RECEIVE, 2, self.unacked_index_key, self.unacked_key, delivery_tag, entry)
            self.channel.on_recorded()
        virtual.QoS.append(self, message, delivery_tag)
        if is_bulk(message.properties.get("priority")):
            self._bulk.add(delivery_tag)

    def restore_visible(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        """Put deliveries back whose lease has ended."""
        self.channel.put_back()
        self._vrestore_count += 1
        if (self._vrestore_count - 1) % (interval or 1):
            return
        limit = {"offset": start, "num": num} if num else {}
        with self.channel.conn_or_acquire() as client:
            seconds, microseconds = client.time()
            ended = seconds + microseconds / 1e6 - self.visibility_timeout
            try:
                with plain.Mutex(client, self.unacked_mutex_key, self.unacked_mutex_expire):
                    for tag in client.zrange(self.unacked_index_key, "-inf", ended, byscore=True, **limit):
                        self.restore_by_tag(tag, client)
            except plain.MutexHeld:
                pass

    def can_consume(self) -> bool:
        """Not while the channel is paused, either."""
        return not self.channel.paused and bool(super().can_consume())


class LeaseChannel(FetchingChannel):
    """See the module.

    Attributes:
        paused: nothing more is taken from the queues. (One message may have been handed out already.)
        worker_id: whom dead letters name.
        on_in_hand: called with a message that is only here, until Redis takes it back; must not wait.
        credit: limits of bulk; none when unset.
        heard: the most that heard a message to all since this was set to 0.
    """

    QoS = LeaseQoS
    paused = False
    worker_id = ""
    heard = 0
    credit: Credit | None = None
    on_in_hand: Callable[[bytes], None] | None = None
    _taken: tuple[bytes, bytes] | None = None
    _unrecorded: tuple[bytes, bytes] | None = None  # as ``_taken``, until Redis has noted the delivery
    _urgent_only = False  # of the pop that waits
    _client_id: tuple[Any, int] | None = None  # of the connection that pops, with its socket

    def put_aside(self, queue: str, reason: str, message: str, job_id: str | None = None) -> None:
        """Keep what nobody can read where the sweeper finds it and moves it to the table ``dead_letter``."""
        logger.error("A message of queue %s cannot be read and is put aside: %s", queue, reason)
        letter = {
            "id": str(uuid.uuid4()),
            "queue": queue,
            "worker_id": self.worker_id,
            "reason": reason,
            "message": message,
            "job_id": job_id,
        }
        with self.conn_or_acquire() as client:
            client.lpush(DEAD_LETTERS_KEY, json.dumps(letter))

    def _create_client(self, *args: Any, **kwargs: Any) -> Any:
        client = super()._create_client(*args, **kwargs)
        client.parse_response = partial(self._remember, client.parse_response)
        return client

    def _connparams(self, *args: Any, **kwargs: Any) -> Any:
        """Kombu takes them from the connection, which a channel outlives: what it delivered may still be ended."""
        if getattr(self.connection, "client", None) is None:
            raise plain.redis.ConnectionError("the connection of these deliveries is closed")
        params = super()._connparams(*args, **kwargs)
        params["connection_class"] = noticing_refusals(params["connection_class"])
        return params

    def _remember(self, parse: Any, connection: Any, command_name: str, **options: Any) -> Any:
        answer = parse(connection, command_name, **options)
        if command_name == "BRPOP":
            self._taken = self._unrecorded = answer or None
        elif command_name == "PUBLISH" and isinstance(answer, int):
            self.heard = max(self.heard, answer)
        return answer

    def on_recorded(self) -> None:
        """The message that was popped last is noted as unacknowledged."""
        self._unrecorded = None

    def put_back(self) -> None:
        """Put messages back that are only here, because Redis did not take the note of their delivery.

        Raises the client's connection errors; what is left then is put back the next time.
        """
        while _in_hand:
            key, raw = _in_hand[0]
            with self.conn_or_acquire() as client:
                client.eval(_PUT_BACK, 1, key, raw)
            del _in_hand[0]

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        steps = self._steps()
        self._urgent_only = len(steps) < len(self.priority_steps)
        connection = self.client.connection
        if self._urgent_only and not self._know_client(connection):
            timeout = _SHORT_POP_S
        keys = [self._q_for_pri(queue, step) for step in steps for queue in queues]
        self._in_poll = connection
        self._brpop_sent_at = monotonic()
        connection.send_command("BRPOP", *keys, self.brpop_timeout if timeout is None else timeout)

    def _steps(self) -> list[int]:
        """The priority steps to pop from, the first first."""
        urgent = [step for step in self.priority_steps if not is_bulk(step)]
        bulk = [step for step in self.priority_steps if is_bulk(step)]
        if self.credit is None:
            return urgent + bulk
        held = self.qos.bulk
        if held >= self.credit.most:
            return urgent
        return bulk + urgent if held < self.credit.least else urgent + bulk

    def fetch_plan(self) -> tuple[list[tuple[int, bool]], int | None]:
        """The priority steps to fetch from, the first first, with which are bulk; how many of bulk at most."""
        steps = [(step, is_bulk(step)) for step in self._steps()]
        if self.credit is None:
            return steps, None
        held = self.qos.bulk
        return steps, (self.credit.least if held < self.credit.least else self.credit.most) - held

    def _know_client(self, connection: Any) -> bool:
        """Ask Redis once a connection for its number, with which another one can end its wait."""
        if self._client_id is None or self._client_id[0] is not connection._sock:
            try:
                connection.send_command("CLIENT", "ID")
                self._client_id = connection._sock, int(connection.read_response())
            except plain.redis.ResponseError:  # not allowed here
                self._client_id = None
        return self._client_id is not None

    def on_credit(self) -> None:
        """A bulk delivery has ended. A pop that waits for urgent ones only must not wait while bulk could be taken."""
        if not self._urgent_only or not self._in_poll or self._client_id is None or self.credit is None:
            return
        if self.qos.bulk <= self.credit.resume:
            self._urgent_only = False
            try:
                with self.conn_or_acquire() as client:
                    client.client_unblock(self._client_id[1])
            except (plain.redis.RedisError, OSError) as exc:
                logger.debug("A waiting pop goes on to its end: %r", exc)

    def _brpop_read(self, **options: Any) -> Any:
        try:
            got = super()._brpop_read(**options)
        except UNREADABLE:
            if self._taken is None:
                raise
            self._refuse_taken(*self._taken)
            return True
        except self.connection_errors as exc:
            self._keep_unrecorded(exc)
            raise
        finally:
            self._taken = self._unrecorded = None
        self.fetch_more()
        return got

    def _refuse_taken(self, key: bytes, raw: bytes) -> None:
        try:
            self.refuse(key.decode(errors="replace").rsplit(self.sep, 1)[0], raw)
        except self.connection_errors as exc:
            self._keep_unrecorded(exc)
            raise

    def _keep_unrecorded(self, error: BaseException) -> None:
        """The popped message may be nowhere but here. (If Redis has the note all the same, it comes twice.)"""
        if self._unrecorded is None:
            return
        _in_hand.append(self._unrecorded)
        try:
            self.put_back()
        except self.connection_errors:
            logger.warning("A message was taken and could not be noted (%r); it goes back later", error)
            if self.on_in_hand is not None:
                self.on_in_hand(_in_hand[-1][1])

    def refuse(self, queue: str, raw: bytes) -> None:
        """Put aside what cannot be read; raises again what is no fault of the message."""
        if (reason := unreadable(raw)) is None:
            raise
        self.put_aside(queue, reason, raw.decode(errors="backslashreplace"))


class LeaseTransport(plain.Transport):  # type: ignore[misc]
    """Plain, TLS and socket URLs."""

    Channel = LeaseChannel


class LeaseSentinelChannel(LeaseChannel, plain.SentinelChannel):  # type: ignore[misc]
    """``LeaseChannel`` behind Sentinel."""


class LeaseSentinelTransport(plain.SentinelTransport):  # type: ignore[misc]
    """Sentinel URLs."""

    Channel = LeaseSentinelChannel


def with_leases(connection: Connection) -> Connection:
    """Have this unused connection, made from its URL, use the classes of this module.

    Its ``transport_cls`` stays as it is, because Celery shows it.
    """
    ours = {"redis": LeaseTransport, "rediss": LeaseTransport, "sentinel": LeaseSentinelTransport}
    if found := ours.get(str(connection.transport_cls)):
        connection.get_transport_cls = lambda: found
    return connection


def is_bulk(priority: object) -> bool:
    """Whether a message of this priority is bulk work."""
    return isinstance(priority, int) and priority >= BULK_PRIORITY


def unreadable(raw: bytes) -> str | None:
    """Why kombu cannot make a message of this, or ``None`` when it can."""
    try:
        message = json.loads(raw)
    except ValueError:
        return "it is no JSON"
    except RecursionError:
        return "it is nested too deeply"
    if not isinstance(message, Mapping):
        return "it is no JSON object"
    properties = message.get("properties")
    if not isinstance(properties, Mapping):
        return "it has no properties"
    if not isinstance(properties.get("delivery_tag"), str):
        return "its properties have no delivery_tag"
    info = properties.get("delivery_info")
    if not isinstance(info, Mapping) or not {"exchange", "routing_key"} <= info.keys():
        return "its properties have no delivery_info with exchange and routing_key"
    encoding, body = properties.get("body_encoding"), message.get("body")
    if encoding not in (None, "", "base64"):
        return "its body_encoding is not base64"
    if body and encoding:
        try:
            base64.b64decode(body)
        except (ValueError, TypeError):
            return "its body is not base64"
    return None
