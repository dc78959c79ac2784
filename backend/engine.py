"""The ``async`` backend: a persistent engine thread around the step loop."""

from __future__ import annotations

import atexit
import logging
import queue
import random
import threading
import time
from collections.abc import Callable

from backend.api import (
    MAX_SEED,
    BackendInfo,
    BackendStats,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    KVCapacityError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from backend.assembly import EngineParts, build_engine
from backend.config import EngineConfig
from backend.core import EngineCore
from backend.loading import on_device
from backend.output import OutputProcessor
from backend.sequence import Sequence

logger = logging.getLogger(__name__)

Command = Callable[[EngineCore], None]


def create_backend(config: EngineConfig) -> AsyncEngine:
    """Entry point of the backend named ``async``."""
    return AsyncEngine(config)


class AsyncEngine:
    """A ``Backend``: asynchronous continuous batching over a paged cache."""

    name = "async"

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number = 0
        self._closed: EngineDeadError | None = EngineDeadError("the engine has not been started")
        self._death: EngineDeadError | None = None
        self._death_callbacks: list[Callable[[EngineDeadError], None]] = []
        self._stopping = False
        self._draining = False
        self._parts: EngineParts | None = None
        self._output: OutputProcessor | None = None
        self._thread: threading.Thread | None = None
        self._started_at = 0.0
        self._queued = 0  # submitted and not yet taken in by the thread

    # ------------------------------------------------------------------------------------------------- life cycle

    def start(self) -> None:
        """See ``Backend.start``."""
        if self._thread is not None:
            raise EngineDeadError("the engine was started before; make a new one")

        def sink(loaded: object) -> OutputProcessor:
            tokenizer = getattr(loaded, "tokenizer", None)
            self._output = OutputProcessor(tokenizer, self._stop_found, clock=self._clock)
            return self._output

        self._parts = build_engine(self._config, sink, self._clock)
        assert self._output is not None
        self._output.start()
        self._started_at = self._clock()
        self._closed = None
        self._thread = threading.Thread(target=self._run, name="tokenmill-engine", daemon=True)
        # A thread that is still within PyTorch when the interpreter goes away aborts the process.
        atexit.register(self._leave)
        self._thread.start()

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None:
        """See ``Backend.shutdown``."""
        with self._lock:
            if self._closed is None:
                self._closed = EngineDeadError("the engine has been shut down")
        thread = self._thread
        if thread is None:
            return

        def stop(_core: EngineCore) -> None:
            self._stopping, self._draining = True, drain

        def abandon(_core: EngineCore) -> None:
            self._draining = False

        self._inbox.put(stop)
        assert self._output is not None
        if threading.current_thread() is thread or self._output.is_current_thread():
            return  # called from one of our callbacks, whose thread cannot wait for its own end
        thread.join(timeout_s if drain else None)
        if thread.is_alive():
            self._inbox.put(abandon)
            thread.join()

    def _leave(self) -> None:
        self.shutdown(drain=False)

    def add_death_callback(self, callback: Callable[[EngineDeadError], None]) -> None:
        """See ``Backend.add_death_callback``."""
        with self._lock:
            if self._death is None:
                self._death_callbacks.append(callback)
                return
        callback(self._death)

    # --------------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """See ``Backend.submit``."""
        self._check_open()
        parts = self._parts
        assert parts is not None
        prompt_ids = parts.loaded.encoder.encode(request.prompt)
        self._check_sampling(request.sampling)
        max_new = self._check_lengths(request.sampling, len(prompt_ids))
        seed = request.sampling.seed
        handle = GenerationHandle(request, lambda: self._cancel(sequence))
        with self._lock:
            self._check_open()
            if self._queued + parts.core.scheduler.num_waiting >= self._config.max_waiting:
                raise QueueFullError(
                    f"{self._config.max_waiting} requests wait already",
                    field="max_waiting",
                    fix="Submit again later, or raise max_waiting",
                )
            self._number += 1
            sequence = Sequence(
                request,
                handle,
                prompt_ids,
                number=self._number,
                seed=self._rng.randint(0, MAX_SEED) if seed is None else seed,
                eos_ids=parts.loaded.eos_ids,
                max_new_tokens=max_new,
                arrived_at=self._clock(),
            )
            self._queued += 1

            def add(core: EngineCore) -> None:
                with self._lock:
                    self._queued -= 1
                core.add(sequence)

            self._inbox.put(add)
        return handle

    def _check_open(self) -> None:
        if (closed := self._closed) is not None:
            # A new error each time: one that is raised again and again would collect every caller's traceback.
            raise EngineDeadError(str(closed)) from closed.__cause__

    def _check_sampling(self, sampling: SamplingParams) -> None:
        assert self._parts is not None
        vocab_size = self._parts.loaded.vocab_size
        if sampling.top_k > vocab_size:
            raise RequestError(
                f"must not exceed the vocabulary of {vocab_size}",
                field="top_k",
                value=sampling.top_k,
                fix=f"Use at most {vocab_size}, or 0 for all",
            )
        if (sampling.logprobs or 0) > vocab_size:
            raise RequestError(
                f"must not exceed the vocabulary of {vocab_size}",
                field="logprobs",
                value=sampling.logprobs,
                fix=f"Use at most {vocab_size}",
            )
        for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            worst = max(ids, default=0)
            if worst >= vocab_size:
                raise RequestError(
                    f"token id {worst} is outside the vocabulary of {vocab_size}",
                    field=field,
                    fix=f"Use ids from 0 to {vocab_size - 1}",
                )
        if sampling.stop and self._parts.loaded.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model runs without one",
                field="stop",
                fix="Use stop_token_ids",
            )

    def _check_lengths(self, sampling: SamplingParams, prompt_tokens: int) -> int:
        """Most new tokens that the context leaves room for."""
        assert self._parts is not None
        limit = self._parts.loaded.max_model_len
        if prompt_tokens >= limit:
            raise PromptTooLongError(
                f"{prompt_tokens} tokens leave no room for a new one in a context of {limit}",
                field="prompt",
                fix=f"Shorten it to at most {limit - 1} tokens",
            )
        max_new = min(sampling.max_tokens, limit - prompt_tokens)
        # The last token is never fed back, so its keys and values need no room.
        block_size = self._config.block_size
        needed = -(-(prompt_tokens + max_new - 1) // block_size)
        total = self._parts.cache.num_blocks
        if needed > total:
            raise KVCapacityError(
                f"{prompt_tokens} prompt and {max_new} new tokens need {needed} KV blocks of {block_size}, but there "
                f"are {total} in all",
                field="max_tokens",
                value=sampling.max_tokens,
                fix="Lower max_tokens, shorten the prompt, or give the worker a larger KV cache",
            )
        return max_new

    def _cancel(self, sequence: Sequence) -> None:
        self._inbox.put(lambda core: core.end(sequence, FinishReason.CANCELLED))

    def _stop_found(self, sequence: Sequence) -> None:
        self._inbox.put(lambda core: core.end(sequence, FinishReason.STOP))

    # ------------------------------------------------------------------------------------------------------ figures

    def info(self) -> BackendInfo:
        """See ``Backend.info``."""
        if self._parts is None:
            raise EngineDeadError("the engine has not been started")
        loaded, cache = self._parts.loaded, self._parts.cache
        return BackendInfo(
            backend=self.name,
            model=loaded.name,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            slots=self._config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            details=self._config.model_dump(mode="json")
            | {
                "attention": self._parts.kernel.name,
                "num_kv_blocks": cache.num_blocks,
                "kv_cache_bytes": cache.num_bytes,
            }
            | self._parts.describe(),
        )

    def stats(self) -> BackendStats:
        """See ``Backend.stats``. Read without a lock: a count may be a step older than its neighbour."""
        if self._parts is None:
            return BackendStats()
        core = self._parts.core
        scheduler, allocator = core.scheduler, core.allocator
        return BackendStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + self._queued,
            steps=core.steps,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=core.generated_tokens,
            requests_finished=core.finished,
            requests_failed=core.failed,
            preemptions=scheduler.num_preemptions,
            busy_s=core.busy_s,
            prepare_s=core.prepare_s,
            wall_s=self._clock() - self._started_at,
            kv_blocks_total=allocator.num_blocks,
            kv_blocks_free=allocator.num_free,
        )

    # -------------------------------------------------------------------------------------------- the engine thread

    def _run(self) -> None:
        assert self._parts is not None
        core = self._parts.core
        with on_device(self._parts.loaded.device):
            self._serve(core)

    def _serve(self, core: EngineCore) -> None:
        assert self._output is not None
        try:
            while not (self._stopping and not (self._draining and core.has_work())):
                self._take_commands(core)
                if core.has_work():
                    core.step()
            for sequence in core.living():
                core.end(sequence, FinishReason.CANCELLED)
            while core.has_work():
                core.step()
            self._refuse_late_commands(core)
            core.check_idle()
        except BaseException as exc:
            self._die(exc, core)
        finally:
            self._output.stop()
            atexit.unregister(self._leave)

    def _take_commands(self, core: EngineCore) -> None:
        if not core.has_work():
            self._inbox.get()(core)
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command(core)

    def _refuse_late_commands(self, core: EngineCore) -> None:
        """Requests that came in before the door closed, but after the last look into the inbox."""
        while True:
            try:
                self._inbox.get_nowait()(core)
            except queue.Empty:
                break
        for sequence in core.living():
            core.end(sequence, FinishReason.CANCELLED)

    def _die(self, cause: BaseException, core: EngineCore) -> None:
        logger.error("the engine has died", exc_info=cause)
        error = EngineDeadError(f"the engine met a fault and has stopped: {cause!r}")
        error.__cause__ = cause
        with self._lock:
            self._closed = self._death = error
            callbacks, self._death_callbacks = self._death_callbacks, []
        while True:
            try:
                self._inbox.get_nowait()(core)
            except queue.Empty:
                break
            except Exception:
                logger.exception("a command to the dead engine failed")
        assert self._output is not None
        for sequence in core.abandon():
            self._output.fail(sequence, error)
        for callback in callbacks:
            self._tell(callback, error)

    @staticmethod
    def _tell(callback: Callable[[EngineDeadError], None], error: EngineDeadError) -> None:
        try:
            callback(error)
        except Exception:
            logger.exception("a death callback failed")
