"""From retired tokens to texts, streams and results, on a thread of its own so that the engine never decodes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backend.api import FinishReason, GenerationResult, TokenChunk, TokenLogprob, TokenmillError
from backend.sequence import Sequence
from backend.stopping import Finish, OutputAssembler, StopCriteria, TextDecoder

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Detokenises, watches for stop strings and settles handles, in the order in which the engine reports.

    A stop string is found some steps after its last token was sampled. The result is cut where the string was
    completed, whatever the engine has generated since, so it does not depend on timing.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        on_stop: Callable[[Sequence], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer)
        self._on_stop = on_stop
        self._clock = clock
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._assemblers: dict[int, OutputAssembler] = {}
        self._settled: set[int] = set()  # ended by a stop string; the engine has still to report their end
        self._thread = threading.Thread(target=self._run, name="tokenmill-output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Deal with everything reported so far, then end the thread."""
        self._events.put(None)
        self._thread.join()

    def is_current_thread(self) -> bool:
        """Whether the caller runs on the output thread: in a callback of a future."""
        return threading.current_thread() is self._thread

    # ------------------------------------------------------------------------------- the engine's side: no waiting

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """See ``OutputSink.token``."""
        self._events.put(lambda: self._on_token(sequence, token_id, logprob))

    def finish(self, sequence: Sequence, now: float) -> None:
        """See ``OutputSink.finish``."""
        self._events.put(lambda: self._on_finish(sequence, now))

    def fail(self, sequence: Sequence, error: TokenmillError) -> None:
        """See ``OutputSink.fail``."""
        self._events.put(lambda: self._on_fail(sequence, error))

    # ----------------------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except BaseException:
                # The events carry their own handling; this is for a fault of ours, or a callback that means to exit:
                # nothing may end the thread, for everybody else's results come through it, too.
                logger.exception("output processing failed")

    def _on_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        if sequence.number in self._settled or sequence.handle.done():
            return
        try:
            self._push(sequence, token_id, logprob)
        except BaseException as exc:
            self._give_up(sequence, exc)
            self._on_stop(sequence)

    def _push(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        assembler = self._assembler(sequence)
        piece = assembler.push(token_id, logprob)
        if piece.text or piece.token_ids:
            sequence.handle.push(TokenChunk(piece.text, piece.token_ids))
        if piece.finish is not None and isinstance(piece.finish.stop_reason, str):
            self._settled.add(sequence.number)
            self._settle(sequence, assembler, piece.finish, self._clock())
            self._on_stop(sequence)

    def _on_finish(self, sequence: Sequence, now: float) -> None:
        assembler = self._assemblers.pop(sequence.number, None)
        if sequence.number in self._settled:
            self._settled.discard(sequence.number)
            return
        try:
            if sequence.needs_text:
                self._end(sequence, assembler or self._new_assembler(sequence), now)
            else:
                self._settle_whole(sequence, now)
        except BaseException as exc:
            self._give_up(sequence, exc)

    def _end(self, sequence: Sequence, assembler: OutputAssembler, now: float) -> None:
        assert sequence.finish_reason is not None
        if assembler.finish is None:
            piece = assembler.end(sequence.finish_reason)
            if piece.text or piece.token_ids:
                sequence.handle.push(TokenChunk(piece.text, piece.token_ids))
        self._settle(sequence, assembler, assembler.finish or Finish(sequence.finish_reason), now)

    def _give_up(self, sequence: Sequence, cause: BaseException) -> None:
        """Whatever goes wrong with one sequence's text is told to its caller, and nobody else."""
        error = TokenmillError(f"the output could not be decoded: {cause!r}")
        error.__cause__ = cause
        sequence.handle.fail(error)

    def _on_fail(self, sequence: Sequence, error: TokenmillError) -> None:
        self._assemblers.pop(sequence.number, None)
        self._settled.discard(sequence.number)
        sequence.handle.fail(error)

    def _assembler(self, sequence: Sequence) -> OutputAssembler:
        assembler = self._assemblers.get(sequence.number)
        if assembler is None:
            assembler = self._assemblers[sequence.number] = self._new_assembler(sequence)
        return assembler

    def _new_assembler(self, sequence: Sequence) -> OutputAssembler:
        sampling = sequence.sampling
        criteria = StopCriteria(
            max_new=sequence.max_new_tokens,
            eos_ids=sequence.eos_ids,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
        )
        return OutputAssembler(self._decoder, criteria, sampling.stop, stream=sequence.request.stream)

    def _settle_whole(self, sequence: Sequence, now: float) -> None:
        """The common case: nobody looked at the text on the way, so it is decoded at once."""
        assert sequence.finish_reason is not None
        text = ""
        if self._decoder is not None and sequence.output_ids:
            text = self._decoder.decode(_text_ids(sequence))
        sequence.handle.finish(
            _result(
                sequence,
                text,
                sequence.output_ids,
                self._named(sequence.logprobs),
                sequence.finish_reason,
                sequence.stop_reason,
                now,
            )
        )

    def _named(self, logprobs: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
        """The log-probabilities with their tokens' texts."""
        decoder = self._decoder
        if decoder is None or logprobs is None:
            return logprobs
        return [
            replace(
                entry,
                text=decoder.token_text(entry.token_id),
                top_texts=tuple(decoder.token_text(token_id) for token_id, _ in entry.top),
            )
            for entry in logprobs
        ]

    def _settle(self, sequence: Sequence, assembler: OutputAssembler, finish: Finish, now: float) -> None:
        logprobs = assembler.logprobs if sequence.logprobs is not None else None
        sequence.handle.finish(
            _result(
                sequence,
                assembler.text,
                assembler.token_ids,
                self._named(logprobs),
                finish.reason,
                finish.stop_reason,
                now,
            )
        )


def _text_ids(sequence: Sequence) -> list[int]:
    """The tokens that are part of the text: all but the one that ended it."""
    ids = sequence.output_ids
    if sequence.finish_reason is FinishReason.STOP and isinstance(sequence.stop_reason, int):
        return ids[:-1]
    return ids


def _result(
    sequence: Sequence,
    text: str,
    token_ids: list[int],
    logprobs: list[TokenLogprob] | None,
    reason: FinishReason,
    stop_reason: str | int | None,
    now: float,
) -> GenerationResult:
    arrived = sequence.arrived_at

    def since(moment: float | None) -> float | None:
        return None if moment is None else max(0.0, moment - arrived)

    return GenerationResult(
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=reason,
        prompt_tokens=len(sequence.prompt_ids),
        completion_tokens=len(token_ids),
        stop_reason=stop_reason,
        cached_tokens=sequence.cached_tokens,
        seed=sequence.seed if sequence.sampling.temperature > 0 else sequence.sampling.seed,
        # One that was never scheduled has waited all the time.
        queue_time_s=(now if sequence.first_scheduled_at is None else sequence.first_scheduled_at) - arrived,
        time_to_first_token_s=since(sequence.first_token_at),
        latency_s=max(0.0, now - arrived),
        preemptions=sequence.preemptions,
        logprobs=None if logprobs is None else tuple(logprobs),
    )
