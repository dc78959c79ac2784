"""transformers' own continuous batching behind the ``Backend`` protocol: the peer that ours is measured by.

It runs every causal model that transformers can batch, greedily. What it cannot do for one request among
others (sampling with seeds, penalties, log-probabilities, …) is refused at submission by name.

Priority, slots, cancels and deadlines are kept here (``Admission``); its manager gets a request when a slot
is free. One thread routes what the manager produces, and notices when the manager's own thread has died.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.admission import Admission, Lifecycle, Row
from backend.api import (
    BackendInfo,
    BackendStats,
    ConfigurationError,
    EngineDeadError,
    GenerationHandle,
    GenerationRequest,
    GenerationResult,
    KVCapacityError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenChunk,
)
from backend.config import EngineConfig
from backend.stopping import OutputAssembler, StopCriteria
from backend.transformers_manager import (
    has_results,
    make_manager,
    refuse_unsupported,
    start_manager,
    stop_manager,
)

_POLL_S = 0.05  # the manager has no event for "a deadline passed" or "the thread died"
_DEATH_GRACE_S = 1.0  # between a request that the manager failed and the end of the manager's thread


def create_backend(config: EngineConfig) -> TransformersBackend:
    """The entry point ``transformers`` of the group ``tokenmill.backends``."""
    return TransformersBackend(config)


@dataclass(eq=False, slots=True, kw_only=True)
class _PeerRow(Row):
    """A request, the name under which the manager knows it, and what has come of it."""

    key: str
    prompt_ids: list[int]
    criteria: StopCriteria
    output: OutputAssembler
    failure: tuple[float, str] | None = None  # when and why the manager failed it

    def result(self, now: float) -> GenerationResult:
        finish = self.output.finish
        if finish is None:
            raise RuntimeError(f"request {self.key} has no end yet")
        return GenerationResult(
            text=self.output.text,
            token_ids=tuple(self.output.token_ids),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.output.token_ids),
            seed=self.handle.request.sampling.seed,
            queue_time_s=(now if self.started is None else self.started) - self.submitted,
            time_to_first_token_s=None if self.first_token is None else self.first_token - self.submitted,
            latency_s=now - self.submitted,
        )


class TransformersBackend:
    """``ContinuousBatchingManager`` with its default settings, in ``max_num_seqs`` slots.

    Args:
        config: the model and the sizes. With ``num_kv_blocks``, its cache has so many pages of ``block_size``.
        clock: seconds on a clock that never goes back.
        load: gives the model; ``backend.loading.load_model`` with transformers' SDPA attention by default.
    """

    name = "transformers"

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[EngineConfig], Any] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._load = load or _load_sdpa
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()  # guards everything below
        self._rows: Admission[_PeerRow] = Admission(
            slots=config.max_num_seqs, max_waiting=config.max_waiting, min_bulk=config.min_bulk_seqs
        )
        self._by_key: dict[str, _PeerRow] = {}
        self._life = Lifecycle(self.name)
        self._keys = itertools.count()
        self._thread: threading.Thread | None = None
        self._loaded: Any = None
        self._manager: Any = None
        self._started_at: float | None = None
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._prompt_tokens = self._generated = self._finished = self._failed = 0

    # --------------------------------------------------------------------------------- called from anywhere

    def start(self) -> None:
        """Load the model and start both threads. A second call does nothing."""
        with self._start_lock:
            if self._thread is not None:
                return
            self._loaded = self._load(self._config)
            self._manager = make_manager(self._loaded, self._config)
            ready = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(ready,), name="transformers-backend", daemon=True
            )
            # A thread that is still within PyTorch when the interpreter goes away aborts the process.
            atexit.register(self._leave)
            self._thread.start()
            ready.wait()
        with self._lock:
            if self._life.dead is not None:
                raise ConfigurationError(str(self._life.dead)) from self._life.dead
            self._started_at = self._clock()
            self._life.open()

    def info(self) -> BackendInfo:
        """What is running."""
        loaded = self._model()
        return BackendInfo(
            backend=self.name,
            model=loaded.name,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            slots=self._config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            details=self._config.model_dump(mode="json"),
        )

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Queue a request; see ``Backend.submit``."""
        with self._lock:
            self._life.check_open()
        loaded = self._model()
        sampling = request.sampling
        refuse_unsupported(sampling, loaded.vocab_size)
        prompt_ids = loaded.encoder.encode(request.prompt)
        criteria = StopCriteria(
            max_new=self._room(prompt_ids, sampling),
            eos_ids=loaded.eos_ids,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        )
        if sampling.stop and loaded.tokenizer is None:
            raise RequestError(
                "needs a tokenizer, and this model runs without one", field="stop", fix="Use stop_token_ids"
            )
        handle = GenerationHandle(request, lambda: self._cancel(row))
        row = _PeerRow(
            handle=handle,
            submitted=self._clock(),
            key=f"{next(self._keys)}",
            prompt_ids=prompt_ids,
            criteria=criteria,
            output=OutputAssembler(loaded.tokenizer, criteria, sampling.stop, stream=request.stream),
        )
        with self._lock:
            self._life.check_open()
            self._rows.add(row)
            self._admit()
        return handle

    def stats(self) -> BackendStats:
        """Counters and gauges of this moment.

        The manager's cache and steps cannot be seen from outside: ``busy_s`` is the time with a running request.
        """
        with self._lock:
            now = self._clock()
            running = 0.0 if self._busy_since is None else now - self._busy_since
            return BackendStats(
                running=len(self._rows.running),
                waiting=self._rows.num_waiting,
                steps=getattr(self._manager, "current_batch", 0),
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated,
                requests_finished=self._finished,
                requests_failed=self._failed,
                busy_s=self._busy_s + running,
                wall_s=0.0 if self._started_at is None else now - self._started_at,
            )

    def add_death_callback(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call ``callback`` once on a fault, or at once when that has happened."""
        with self._lock:
            dead = self._life.on_death(callback)
        if dead is not None:
            callback(dead)

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None:
        """Stop; with ``drain`` accepted requests may finish within ``timeout_s``, the rest end as cancelled."""
        with self._lock:
            now = self._clock()
            self._life.close(
                float("inf") if drain and timeout_s is None else now + (timeout_s or 0.0) * drain
            )
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _leave(self) -> None:
        self.shutdown(drain=False)

    def _cancel(self, row: _PeerRow) -> None:
        with self._lock:
            self._rows.cancel(row)

    def _model(self) -> Any:
        if self._loaded is None:
            raise EngineDeadError("the transformers backend has not been started")
        return self._loaded

    def _room(self, prompt_ids: list[int], sampling: SamplingParams) -> int:
        """New tokens at most, the context limit included."""
        limit: int = self._model().max_model_len
        if len(prompt_ids) >= limit:
            raise PromptTooLongError(
                f"{len(prompt_ids)} tokens leave no room for a new one in a context of {limit}",
                field="prompt",
                fix=f"Shorten it to {limit - 1} tokens or fewer",
            )
        new: int = min(sampling.max_tokens, limit - len(prompt_ids))
        if self._config.num_kv_blocks is not None:
            capacity = self._config.num_kv_blocks * self._config.block_size
            if len(prompt_ids) + new > capacity:
                raise KVCapacityError(
                    f"{len(prompt_ids)} prompt and {new} new tokens can never fit a cache of {capacity}",
                    field="max_tokens",
                    fix="Lower max_tokens, shorten the prompt, or raise num_kv_blocks",
                )
        return new

    # ------------------------------------------------------------------------------------ the router thread

    def _run(self, ready: threading.Event) -> None:
        try:
            start_manager(self._manager)
            ready.set()
            while self._cycle():
                pass
        except BaseException as exc:
            self._die(exc)
        finally:
            ready.set()
            stop_manager(self._manager)
            atexit.unregister(self._leave)

    def _cycle(self) -> bool:
        """Route what has come, or wait a little for something; false when all has ended after a shutdown."""
        output = self._manager.get_result(timeout=_POLL_S)
        with self._lock:
            now = self._clock()
            ended = self._rows.end_early(now, self._life.stop_at)
        for row, reason in ended:
            self._forget(row)
            self._finish(row, row.output.end(reason), now)
        while output is not None:
            self._route(output, now)
            output = self._manager.get_result(timeout=0) if has_results(self._manager) else None
        self._check_health(now)
        with self._lock:
            self._admit()
            return self._life.stop_at is None or len(self._rows) > 0

    def _admit(self) -> None:
        now = self._clock()
        for row in self._rows.admit(now):
            self._by_key[row.key] = row
            self._prompt_tokens += len(row.prompt_ids)
            # -1 stands for "none": an empty list would mean the generation configuration's own.
            ending = sorted(row.criteria.ending_ids) or [-1]
            self._manager.add_request(
                row.prompt_ids,
                request_id=row.key,
                max_new_tokens=row.criteria.max_new,
                streaming=True,  # a cancel or a deadline hands out what has been generated by then
                eos_token_id=ending,
            )
        if self._rows.running and self._busy_since is None:
            self._busy_since = now
        elif not self._rows.running and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def _route(self, output: Any, now: float) -> None:
        row = self._by_key.get(output.request_id)
        if row is None:
            return  # ended early, and the manager had not heard of it yet
        tokens = output.generated_tokens
        text: list[str] = []
        completed: list[int] = []
        for token in tokens[len(row.output.token_ids) :]:
            row.first_token = now if row.first_token is None else row.first_token
            piece = row.output.push(int(token))
            self._generated += 1
            text.append(piece.text)
            completed += piece.token_ids
            if piece.finish is not None:
                break
        chunk = TokenChunk("".join(text), tuple(completed))
        if row.output.finish is not None:
            over = output.is_finished()
            with self._lock:
                self._rows.finish(row)
            self._forget(row, cancel=not over)
            self._finish(row, chunk, now)
        elif output.error is not None:
            row.failure = row.failure or (now, output.error)
        elif output.is_finished():
            raise RuntimeError(
                f"a request ended after {len(tokens)} tokens, though no limit of it was reached"
            )
        elif chunk.text or chunk.token_ids:
            row.handle.push(chunk)

    def _forget(self, row: _PeerRow, *, cancel: bool = True) -> None:
        if self._by_key.pop(row.key, None) is not None and cancel:
            self._manager.cancel_request(row.key)

    def _finish(self, row: _PeerRow, last: Any, now: float) -> None:
        with self._lock:
            self._finished += 1
        if last.text or last.token_ids:
            row.handle.push(TokenChunk(last.text, tuple(last.token_ids)))
        row.handle.finish(row.result(now))

    def _check_health(self, now: float) -> None:
        failed = [row for row in self._by_key.values() if row.failure is not None]
        if not self._manager.is_running():
            cause = failed[0].failure[1] if failed and failed[0].failure else "its thread has ended"
            raise RuntimeError(cause)
        for row in failed:
            since, error = row.failure or (now, "")
            if now - since > _DEATH_GRACE_S:  # the manager lives on, so only this request is at fault
                with self._lock:
                    self._rows.finish(row)
                    self._failed += 1
                self._forget(row)
                row.handle.fail(RequestError(f"transformers refused it: {error}", field="request"))

    def _die(self, cause: BaseException) -> None:
        with self._lock:
            error = self._life.die(cause)
            lost = self._rows.abandon()
            self._failed += len(lost)
            self._by_key.clear()
        for row in lost:
            row.handle.fail(error)
        self._life.tell_death()


def _load_sdpa(config: EngineConfig) -> Any:
    from backend.loading import load_model

    return load_model(config, attn_implementation="sdpa")
