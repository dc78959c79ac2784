"""A backend without a model: it answers with the prompt's own words, over and over.

For web developers who want the whole path without a download, and for tests of the fleet. A token is a word
(for ``token_ids`` prompts, an id), ended by ``max_tokens``, a stop string or a stop token id. Parameters that
weigh one token against another (temperature, top_k, penalties, …) are validated and have no effect, since
there is only ever one candidate; its log-probability is 0.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backend.admission import Admission, Lifecycle, Row
from backend.api import (
    MAX_SEED,
    BackendInfo,
    BackendStats,
    EngineDeadError,
    FinishReason,
    GenerationHandle,
    GenerationRequest,
    GenerationResult,
    Prompt,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from backend.config import EngineConfig

VOCAB_SIZE = 131_072
DEFAULT_MODEL_LEN = 32_768
_BURST = 64  # tokens a row gains in a step when the speed is unlimited: cancels get in between
_TICK_S = 0.002  # paced rows within one tick advance together, so that 256 of them are not 256 wake-ups


class Clock(Protocol):
    """Time as the echo thread sees it; tests drive it by hand."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait on ``condition``, which is held, at most ``timeout_s`` seconds of this clock."""


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait for a notification or the timeout."""
        condition.wait(timeout_s)


def create_backend(config: EngineConfig) -> EchoBackend:
    """The entry point ``echo`` of the group ``tokenmill.backends``."""
    return EchoBackend(config)


@dataclass(eq=False, slots=True, kw_only=True)
class _EchoRow(Row):
    """One request on its way: what it repeats, what it has said, what a stop string may still undo."""

    pieces: list[str]  # text of each token of the cycle, without separator
    ids: list[int]
    prompt_tokens: int
    limit: int  # new tokens at most, the context limit included
    seed: int
    tokens: list[int] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    held: str = ""  # the end of the text, which may be the beginning of a stop string
    unsent: deque[tuple[int, int]] = field(default_factory=deque)  # (token, where its text ends)
    length: int = 0  # characters released
    stop_reason: str | int | None = None

    def append(self) -> bool:
        """Say the next token; true when it ends the answer."""
        sampling = self.handle.request.sampling
        index = len(self.tokens) % len(self.ids)
        token = self.ids[index]
        known = len(self.held)
        self.held += f" {self.pieces[index]}" if self.tokens else self.pieces[index]
        self.tokens.append(token)
        self.unsent.append((token, self.length + len(self.held)))
        # What was complete before this token came too early for ``min_tokens``, and is ordinary text.
        found = [
            (at, text)
            for text in sampling.stop
            if (at := self.held.find(text, max(0, known - len(text) + 1))) >= 0
        ]
        if found and len(self.tokens) >= sampling.min_tokens:
            at, self.stop_reason = min(found)
            self.held = self.held[:at]
        elif token in sampling.stop_token_ids and len(self.tokens) > sampling.min_tokens:
            self.stop_reason = token
        return self.stop_reason is not None or len(self.tokens) >= self.limit

    def release(self, *, everything: bool = False) -> TokenChunk | None:
        """The text that no stop string can take back any more, with the tokens that it completes."""
        keep = (
            0 if everything else max((len(text) for text in self.handle.request.sampling.stop), default=1) - 1
        )
        cut = len(self.held) - keep
        text = self.held[:cut] if cut > 0 else ""
        self.released.append(text)
        self.held = self.held[len(text) :]
        self.length += len(text)
        ids = []
        while self.unsent and (everything or self.unsent[0][1] <= self.length):
            ids.append(self.unsent.popleft()[0])
        return TokenChunk(text, tuple(ids)) if text or ids else None

    def result(self, reason: FinishReason, now: float) -> GenerationResult:
        """What came of it; call after the last ``release``."""
        wanted = self.handle.request.sampling.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = tuple(TokenLogprob(t, 0.0, ((t, 0.0),) if wanted else ()) for t in self.tokens)
        return GenerationResult(
            text="".join(self.released),
            token_ids=tuple(self.tokens),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens),
            stop_reason=self.stop_reason if reason is FinishReason.STOP else None,
            seed=self.seed,
            queue_time_s=(now if self.started is None else self.started) - self.submitted,
            time_to_first_token_s=None if self.first_token is None else self.first_token - self.submitted,
            latency_s=now - self.submitted,
            logprobs=logprobs,
        )


class EchoBackend:
    """Repeats prompts in ``max_num_seqs`` slots, at ``echo_tokens_per_s`` a request, from one thread.

    Args:
        config: model name (any), slots, limits and speed.
        clock: time; the machine's own by default.
        draw_seed: gives the seed of a request that has none.
        before_step: called by the thread before each step with the running requests. What it raises is an
            engine fault: the backend dies of it. For tests of what happens then.
    """

    name = "echo"

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbelow(MAX_SEED + 1),
        before_step: Callable[[Sequence[GenerationRequest]], None] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._draw_seed = draw_seed
        self._before_step = before_step
        self._model_len = config.max_model_len or DEFAULT_MODEL_LEN
        self._changed = threading.Condition()  # guards everything below
        self._rows: Admission[_EchoRow] = Admission(
            slots=config.max_num_seqs, max_waiting=config.max_waiting, min_bulk=config.min_bulk_seqs
        )
        self._life = Lifecycle(self.name)
        self._thread: threading.Thread | None = None
        self._started_at: float | None = None
        self._steps = self._prompt_tokens = self._generated = self._finished = self._failed = 0
        self._busy_s = 0.0

    # -------------------------------------------------------------------------------- called from anywhere

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        with self._changed:
            if self._thread is not None:
                return
            self._started_at = self._clock.now()
            self._life.open()
            self._thread = threading.Thread(target=self._run, name="echo-backend", daemon=True)
            self._thread.start()

    def info(self) -> BackendInfo:
        """What is running."""
        return BackendInfo(
            backend=self.name,
            model=self._config.model,
            device="none",
            dtype="none",
            slots=self._config.max_num_seqs,
            max_model_len=self._model_len,
            vocab_size=VOCAB_SIZE,
            details=self._config.model_dump(mode="json"),
        )

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        """Queue a request; see ``Backend.submit``."""
        pieces, ids, prompt_tokens = _words(request.prompt)
        _check(request.sampling, prompt_tokens, self._model_len)
        with self._changed:
            self._life.check_open()
            handle = GenerationHandle(request, lambda: self._cancel(row))
            seed = request.sampling.seed
            row = _EchoRow(
                handle=handle,
                submitted=self._clock.now(),
                pieces=pieces,
                ids=ids,
                prompt_tokens=prompt_tokens,
                limit=min(request.sampling.max_tokens, self._model_len - prompt_tokens),
                seed=self._draw_seed() if seed is None else seed,
            )
            self._rows.add(row)
            self._changed.notify()
        return handle

    def stats(self) -> BackendStats:
        """Counters and gauges of this moment."""
        with self._changed:
            return BackendStats(
                running=len(self._rows.running),
                waiting=self._rows.num_waiting,
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated,
                requests_finished=self._finished,
                requests_failed=self._failed,
                busy_s=self._busy_s,
                wall_s=0.0 if self._started_at is None else self._clock.now() - self._started_at,
            )

    def add_death_callback(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call ``callback`` once on a fault, or at once when that has happened."""
        with self._changed:
            dead = self._life.on_death(callback)
        if dead is not None:
            callback(dead)

    def shutdown(self, *, drain: bool, timeout_s: float | None = None) -> None:
        """Stop; with ``drain`` accepted requests may finish within ``timeout_s``, the rest end as cancelled."""
        with self._changed:
            now = self._clock.now()
            self._life.close(
                float("inf") if drain and timeout_s is None else now + (timeout_s or 0.0) * drain
            )
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _cancel(self, row: _EchoRow) -> None:
        with self._changed:
            self._rows.cancel(row)
            self._changed.notify()

    # -------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        try:
            while self._cycle():
                pass
        except BaseException as exc:
            self._die(exc)

    def _cycle(self) -> bool:
        """Do what is due, or wait until something is; false when everything has ended after a shutdown."""
        with self._changed:
            now = self._clock.now()
            early = self._rows.end_early(now, self._life.stop_at)
            self._prompt_tokens += sum(row.prompt_tokens for row in self._rows.admit(now))
            rows = [row for row in self._rows.running if self._due(row, now) > 0]
            over = self._life.stop_at is not None and not self._rows
            if not (early or rows or over):
                self._clock.wait(self._changed, self._pause(now))
                return True
        self._deliver(early, now)
        if rows:
            self._step(rows, now)
        return not over

    def _due(self, row: _EchoRow, now: float) -> int:
        """How many tokens the row may gain now."""
        rate = self._config.echo_tokens_per_s
        left = row.limit - len(row.tokens)
        if rate is None:
            return min(left, _BURST)
        elapsed = now - (row.started or 0.0)
        return min(left, int(elapsed * rate + 1e-6) - len(row.tokens))

    def _pause(self, now: float) -> float | None:
        """Seconds until something is due; none when only a call can change things."""
        moments = [self._rows.next_deadline()]
        if self._life.stop_at is not None:
            moments.append(self._life.stop_at)
        if rate := self._config.echo_tokens_per_s:
            moments += [(row.started or 0.0) + (len(row.tokens) + 1) / rate for row in self._rows.running]
        soonest = min(moments)
        return None if soonest == float("inf") else max(soonest - now, _TICK_S)

    def _step(self, rows: list[_EchoRow], now: float) -> None:
        if self._before_step is not None:
            self._before_step([row.handle.request for row in rows])
        began = self._clock.now()
        complete: list[tuple[_EchoRow, FinishReason]] = []
        generated = 0
        for row in rows:
            for _ in range(self._due(row, now)):
                generated += 1
                row.first_token = now if row.first_token is None else row.first_token
                if row.append():
                    stopped = row.stop_reason is not None
                    complete.append((row, FinishReason.STOP if stopped else FinishReason.LENGTH))
                    break
            else:
                if chunk := row.release():
                    row.handle.push(chunk)
        with self._changed:
            self._steps += 1
            self._generated += generated
            self._busy_s += self._clock.now() - began
            for row, _ in complete:
                self._rows.finish(row)
        self._deliver(complete, self._clock.now())

    def _deliver(self, ended: list[tuple[_EchoRow, FinishReason]], now: float) -> None:
        """Tell the callers, without the lock: their done-callbacks may call this backend."""
        with self._changed:
            self._finished += len(ended)
        for row, reason in ended:
            if chunk := row.release(everything=True):
                row.handle.push(chunk)
            row.handle.finish(row.result(reason, now))

    def _die(self, cause: BaseException) -> None:
        with self._changed:
            error = self._life.die(cause)
            lost = self._rows.abandon()
            self._failed += len(lost)
        for row in lost:
            row.handle.fail(error)
        self._life.tell_death()


def _words(prompt: Prompt) -> tuple[list[str], list[int], int]:
    """The cycle to repeat, as texts and ids, and how many tokens the whole prompt has."""
    if prompt.token_ids is not None:
        for token in prompt.token_ids:
            if token >= VOCAB_SIZE:
                raise RequestError(
                    "is outside the vocabulary",
                    field="token_ids",
                    value=token,
                    fix=f"Use ids below {VOCAB_SIZE}",
                )
        return [str(token) for token in prompt.token_ids], list(prompt.token_ids), len(prompt.token_ids)
    turns = [prompt.prompt or ""] if prompt.messages is None else [turn.content for turn in prompt.messages]
    words = [spoken for turn in turns if (spoken := turn.split())]
    if not words:
        name = "prompt" if prompt.messages is None else "messages"
        raise RequestError("holds no word to echo", field=name, fix="Give at least one word")
    ids = [zlib.crc32(word.encode()) % VOCAB_SIZE for word in words[-1]]
    return words[-1], ids, sum(len(turn) for turn in words)


def _check(sampling: SamplingParams, prompt_tokens: int, model_len: int) -> None:
    if prompt_tokens >= model_len:
        raise PromptTooLongError(
            f"{prompt_tokens} tokens leave no room for a new one in a context of {model_len}",
            field="prompt",
            fix=f"Shorten it to {model_len - 1} tokens or fewer, or raise max_model_len",
        )
    if sampling.top_k > VOCAB_SIZE:
        raise RequestError(
            "is beyond the vocabulary", field="top_k", value=sampling.top_k, fix=f"Use at most {VOCAB_SIZE}"
        )
    for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in tokens:
            if token >= VOCAB_SIZE:
                raise RequestError(
                    "names a token outside the vocabulary",
                    field=name,
                    value=token,
                    fix=f"Use ids below {VOCAB_SIZE}",
                )
