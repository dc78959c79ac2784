"""Batched sampling: one row of parameters a sequence, every row a pure function of its own inputs.

A row's token depends on its logits, parameters, seed and output index, and on nothing else: neighbours, order in the
batch, chunked prefill and preemption cannot change it. So every operation here is either exact, or made of correctly
rounded steps in a fixed order, or run on one row at a time in shapes that depend on the vocabulary alone.

Order of processing, as in transformers: logit bias, repetition penalty, presence and frequency penalty, tokens banned
while ``min_tokens`` is not reached; then, for random rows, temperature, top-k, top-p, min-p. Equal logits rank by
token id, lower first, also at the border of a filter (where transformers' top-k keeps all of them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend import philox

# Candidates that filtered rows look at: rows that these do not decide go on to the next width, last to a full sort.
_WIDTHS = (64, 1024, 8192)
# The largest tensor that torch's CPU kernels run on one thread. Starting threads for each of hundreds of small
# operations costs more than it gains, and a great deal more when other processes want the cores.
_TILE = 32768
_ROWS = 32  # whose probabilities are held at once


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of the S rows that sample in one step; tensors live on the sampler's device.

    The flags are the host's shortcuts. One that is set without need costs time only; one that is not set although
    a row needs it makes the sampler ignore that parameter.
    """

    temperature: Tensor  # f32[S]; 0 is greedy
    top_k: Tensor  # i32[S]; 0 keeps all
    top_p: Tensor  # f32[S]; 1 keeps all
    min_p: Tensor  # f32[S]; 0 keeps all
    seed: Tensor  # i64[S]
    output_index: Tensor  # i32[S]; index, from 0, of the token to be sampled among the sequence's new tokens
    repetition_penalty: Tensor  # f32[S]; 1 is none
    presence_penalty: Tensor  # f32[S]
    frequency_penalty: Tensor  # f32[S]
    penalty_row: Tensor  # i32[S]; row of PenaltyState, -1 for none
    bias_ids: Tensor  # i32[S, Kb]; -1 pads; no id twice in a row
    bias_values: Tensor  # f32[S, Kb]
    banned_ids: Tensor  # i32[S, Ks]; -1 pads

    any_random: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    any_penalty: bool = False
    any_bias: bool = False
    any_banned: bool = False
    num_logprobs: int = -1  # most alternatives a row asks for; 0: the sampled token's only; -1: nobody asks


@dataclass(slots=True)
class SampledTokens:
    """What one step sampled. A row whose logits are unusable (NaN, or no finite maximum) has token id -1."""

    token_ids: Tensor  # i64[S]
    logprobs: Tensor | None = None  # f32[S] (f64 for f64 logits): log-softmax of the raw logits
    top_ids: Tensor | None = None  # i32[S, K], most likely first
    top_logprobs: Tensor | None = None  # like logprobs, [S, K]


class PenaltyState:
    """Token counts of the sequences that use penalties, on the device, under a persistent row each.

    The last row is a dummy: sequences without penalties count into it and nobody reads it.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.output_counts = torch.zeros(max_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(max_rows + 1, vocab_size, dtype=torch.bool, device=device)

    def init_row(self, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Rebuild ``row`` from a sequence's tokens (i64[...], on the device).

        Call it in the step in which the sequence first samples, before ``sample``: until then a late row of the
        previous owner may still count.
        """
        counts, mask = self.output_counts[row], self.prompt_mask[row]
        counts.zero_()
        mask.zero_()
        mask.index_fill_(0, prompt_ids, True)
        counts.index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def observe(self, rows: Tensor, sampled: Tensor) -> None:
        """Count one sampled token a row (i32[S], i64[S]); rows of -1 and tokens of -1 go to the dummy row."""
        target = torch.where((rows < 0) | (sampled < 0), self.max_rows, rows).long()
        ones = torch.ones_like(sampled, dtype=torch.int32)
        self.output_counts.index_put_((target, sampled.clamp(min=0)), ones, accumulate=True)

    @staticmethod
    def num_bytes(max_rows: int, vocab_size: int) -> int:
        """Device memory that so many rows take."""
        return (max_rows + 1) * vocab_size * (torch.int32.itemsize + torch.bool.itemsize)


class Sampler:
    """Turns logits into tokens; ``sample`` counts them into ``penalties`` itself."""

    def __init__(self, vocab_size: int, device: torch.device, penalties: PenaltyState | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.penalties = penalties

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample one token for each row.

        Args:
            logits: [S, V] in any floating type; not modified.
            batch: parameters of the same S rows.

        Raises:
            ValueError: shapes disagree, or penalties are asked for without a ``PenaltyState``.
        """
        if logits.dim() != 2 or logits.shape[1] != self.vocab_size or len(batch.temperature) != len(logits):
            raise ValueError(
                f"logits {tuple(logits.shape)} do not fit {len(batch.temperature)} rows of {self.vocab_size} tokens"
            )
        if logits.shape[0] == 0:
            return SampledTokens(torch.empty(0, dtype=torch.int64, device=logits.device))
        scores = self._processed(logits, batch)
        peak = scores.amax(dim=-1)  # propagates NaN, also through every processor
        unusable = ~peak.isfinite()
        token_ids = scores.argmax(dim=-1)
        if batch.any_random:
            rows = ((batch.temperature > 0) & ~unusable).nonzero().squeeze(1)
            if rows.numel():
                token_ids[rows] = _draw(scores, peak, batch, rows)
        token_ids.masked_fill_(unusable, -1)
        sampled = SampledTokens(token_ids)
        if batch.num_logprobs >= 0:
            _add_logprobs(sampled, logits, batch.num_logprobs)
        if batch.any_penalty and self.penalties is not None:
            self.penalties.observe(batch.penalty_row, token_ids)
        return sampled

    def _processed(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Logits after bias, penalties and bans; the input itself where none is asked for."""
        if not (batch.any_bias or batch.any_penalty or batch.any_banned):
            return logits
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if batch.any_bias:
            _scatter_add(scores, batch.bias_ids, batch.bias_values.to(scores.dtype))
        if batch.any_penalty:
            if self.penalties is None:
                raise ValueError("penalties are asked for, but this sampler was made without a PenaltyState")
            _penalise(scores, batch, self.penalties)
        if batch.any_banned:
            ban = torch.full_like(batch.banned_ids, -torch.inf, dtype=scores.dtype)
            _scatter_add(scores, batch.banned_ids, ban)
        return scores


def _scatter_add(scores: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add ``values`` at ``ids`` of each row. Padding adds 0 to token 0, which may be among the ids as well."""
    padding = ids < 0
    scores.scatter_add_(1, ids.clamp(min=0).long(), values.masked_fill(padding, 0.0))


def _penalise(scores: Tensor, batch: SamplingBatch, state: PenaltyState) -> None:
    """Apply the penalties in place, touching only tokens that were seen."""
    for row in (batch.penalty_row >= 0).nonzero().squeeze(1).tolist():
        counts = state.output_counts[batch.penalty_row[row]]
        mask = state.prompt_mask[batch.penalty_row[row]]
        tiles = zip(counts.split(_TILE), mask.split(_TILE), strict=True)
        seen = [(count > 0).logical_or_(prompt).nonzero().squeeze(1) for count, prompt in tiles]
        ids = torch.cat([part + _TILE * n for n, part in enumerate(seen)])
        repetition = batch.repetition_penalty[row].to(scores.dtype)
        x, count = scores[row, ids], counts[ids]
        x = torch.where(x < 0, x * repetition, x / repetition)
        x -= batch.presence_penalty[row].to(scores.dtype) * (count > 0)
        x -= batch.frequency_penalty[row].to(scores.dtype) * count
        scores[row, ids] = x


# ------------------------------------------------------------------------------------------------------ random rows


def _draw(scores: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Tokens of the random rows: the argmax over the kept tokens of logit / temperature + Gumbel noise."""
    vocab_size = scores.shape[1]
    filtered = torch.zeros_like(rows, dtype=torch.bool)
    if batch.any_top_k:
        filtered |= (batch.top_k[rows] > 0) & (batch.top_k[rows] < vocab_size)
    if batch.any_top_p:
        filtered |= batch.top_p[rows] < 1
    if batch.any_min_p:
        filtered |= batch.min_p[rows] > 0
    drawn = torch.empty_like(rows)
    if not filtered.all():
        plain = rows[~filtered]
        drawn[~filtered] = _draw_unfiltered(scores, peak, batch, plain)
    if filtered.any():
        drawn[filtered] = _draw_filtered(scores, peak, batch, rows[filtered])
    return drawn


def _noisy(shifted: Tensor, seed: Tensor, output_index: Tensor, token_ids: Tensor) -> Tensor:
    """The float64 score whose argmax is the sample; ``shifted`` is (logit - peak) / temperature, [S, N]."""
    return shifted + philox.gumbel(philox.uniform(seed, output_index, token_ids))


def _probabilities(scores: Tensor, peak: Tensor, temperature: Tensor, rows: Tensor) -> Tensor:
    """softmax(scores[rows] / temperature), at least in float32, [R, V]; each row's bits are its own."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    shifted = (scores[rows].to(wide) - peak[rows, None].to(wide)).div_(temperature[rows, None].to(wide))
    return shifted.softmax(dim=1)


def _draw_unfiltered(scores: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Sample from whole rows: a cheap float32 pass finds the few tokens that can win, float64 decides.

    The token of the largest p / E wins, where p is its probability and E = -log(1 - u) is exponential noise. As
    1/u - 1 < 1/E < 1/u - 1/2, only tokens whose upper bound reaches the largest lower bound can win.
    """
    contenders: list[Tensor] = []
    for some in rows.split(_ROWS):
        probability = _probabilities(scores, peak, batch.temperature, some).float()
        contenders += _contenders(probability, batch.seed[some], batch.output_index[some])
    return _decide(scores, peak, batch, rows, contenders)


def _contenders(probability: Tensor, seed: Tensor, output_index: Tensor) -> list[Tensor]:
    """Ascending ids of the tokens that can win in each row, from f32[R, V], i64[R], i32[R]."""
    vocab_size = probability.shape[1]
    blocks = -(-vocab_size // 4)
    width = -(-blocks // -(-4 * blocks // _TILE))
    height = max(1, _TILE // width)
    found: list[Tensor] = []
    for top in range(0, len(probability), height):
        part = probability[top : top + height]
        uppers: list[list[Tensor]] = [[] for _ in part]
        lowers: list[list[Tensor]] = [[] for _ in part]
        for left in range(0, blocks, width):
            span = torch.arange(left, min(left + width, blocks), device=probability.device)[None]
            lanes = philox.words(seed[top : top + height], output_index[top : top + height], span)
            for i, row in enumerate(part):
                tile = row[left * 4 : (left + width) * 4]
                upper, lower = _race_bounds(tile, [lane[i] for lane in lanes])
                uppers[i].append(upper)
                lowers[i].append(lower)
        for row_uppers, row_lowers in zip(uppers, lowers, strict=True):
            # The margin is many times the float32 rounding of both bounds.
            bar = torch.stack(row_lowers).amax() * (1 - 1e-4)
            hits = [(upper >= bar).nonzero().squeeze(1) for upper in row_uppers]
            found.append(torch.cat([ids + 4 * width * n for n, ids in enumerate(hits)]))
    return found


def _race_bounds(probability: Tensor, lanes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Upper bounds of p / E, up to a common factor, and the largest lower bound, from the four words a block."""
    word = torch.empty(len(lanes[0]), 4, dtype=torch.float32, device=probability.device)
    for lane, values in enumerate(lanes):
        word[:, lane] = values
    upper = probability / word.view(-1)[: len(probability)].add_(0.5)  # p / u, over 2**32
    upper.sub_(probability, alpha=2.0**-33)
    return upper, upper.sub(probability, alpha=2.0**-33).amax()


def _decide(scores: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor, lists: list[Tensor]) -> Tensor:
    """The best of each row's listed tokens (ascending ids), scored exactly; one batch of small operations."""
    ids = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)
    safe = ids.clamp(min=0)
    shifted = (scores[rows[:, None], safe].double() - peak[rows, None].double()) / batch.temperature[
        rows, None
    ].double()
    noisy = _noisy(shifted, batch.seed[rows], batch.output_index[rows], safe)
    best = noisy.masked_fill_(ids < 0, -torch.inf).argmax(dim=1, keepdim=True)
    return safe.gather(1, best).squeeze(1)


def _draw_filtered(scores: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Sample rows with top-k, top-p or min-p. Each filter keeps a prefix of the tokens sorted by logit."""
    vocab_size = scores.shape[1]
    drawn = torch.empty_like(rows)
    place = torch.arange(len(rows), device=rows.device)  # of the rows still open, in ``drawn``
    mass = _full_mass(scores, peak, batch, rows)
    for limit in (*_WIDTHS, vocab_size):
        width = min(limit, vocab_size)
        now = rows[place]
        values, ids = top_candidates(scores[now], width)
        temperature = batch.temperature[now, None].double()
        shifted = (values.double() - peak[now, None].double()) / temperature
        kept, decided = _kept(shifted, batch, now, mass[place], vocab_size)
        done = decided.nonzero().squeeze(1)
        if done.numel():
            most = int(kept[done].max())
            noisy = _noisy(
                shifted[done, :most], batch.seed[now[done]], batch.output_index[now[done]], ids[done, :most]
            )
            outside = torch.arange(most, device=rows.device) >= kept[done, None]
            best = noisy.masked_fill_(outside, -torch.inf).argmax(dim=1, keepdim=True)
            drawn[place[done]] = ids[done].gather(1, best).squeeze(1)
        place = place[~decided]
        if not place.numel():
            break
    return drawn


def _full_mass(scores: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Sum of exp(shifted logits) over the vocabulary, f64[R], for rows with top-p but no top-k; else 1."""
    mass = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    if not batch.any_top_p:
        return mass
    needed = batch.top_p[rows] < 1
    if batch.any_top_k:
        needed &= (batch.top_k[rows] <= 0) | (batch.top_k[rows] >= scores.shape[1])
    if needed.any():
        # The likeliest token's own term is exp(0) = 1.
        top = _probabilities(scores, peak, batch.temperature, rows[needed]).amax(dim=1)
        mass[needed] = 1.0 / top.double()
    return mass


def _kept(
    shifted: Tensor, batch: SamplingBatch, rows: Tensor, mass: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """How many of the sorted candidates (f64[R, W]) the filters keep, and whether W of them decide it."""
    width = shifted.shape[1]
    weight = philox.exp(shifted)
    everything = torch.full_like(rows, vocab_size)
    kept, known = everything, torch.ones_like(rows, dtype=torch.bool)
    if batch.any_top_k:
        top_k = batch.top_k[rows].long()
        kept = torch.where(top_k > 0, top_k.clamp(max=vocab_size), everything)
    if batch.any_top_p:
        top_p = batch.top_p[rows].double()
        limited = kept < vocab_size  # by top-k: the share is then one of the top k's mass
        inside = torch.arange(width, device=rows.device) < kept[:, None]
        sums = torch.where(inside, weight, 0.0).cumsum(dim=1)
        goal = (top_p * torch.where(limited, sums[:, -1], mass))[:, None]
        # A token is kept while the mass before it is below the goal.
        count = 1 + (sums[:, :-1] < goal).sum(dim=1)
        count = torch.where((sums[:, -1:] < goal).squeeze(1) & ~limited, everything, count)
        active = top_p < 1
        known = ~(active & limited & (kept > width))
        kept = torch.where(active, torch.minimum(kept, count), kept)
    if batch.any_min_p:
        count = (weight >= batch.min_p[rows, None].double()).sum(dim=1)
        kept = torch.minimum(kept, torch.where(count < width, count.clamp(min=1), everything))
    return kept, (known & (kept <= width)) | (width == vocab_size)


def top_candidates(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row, equal values by ascending index: values and i64 indices, [S, width]."""
    if width >= x.shape[1]:
        ordered, indices = x.sort(dim=1, descending=True, stable=True)
        return ordered, indices
    values, ids = x.topk(width + 1, dim=1)
    border = values[:, width - 1]
    tied = (border == values[:, width]).nonzero().squeeze(1)
    ids = ids[:, :width]
    for row in tied.tolist():
        # topk picks any of the tokens that share the border's value: take the lowest ids instead.
        above = ids[row][values[row, :width] > border[row]]
        level = (x[row] == border[row]).nonzero().squeeze(1)
        ids[row] = torch.cat([above, level[: width - len(above)]])
    ids = ids.sort(dim=1).values
    ordered, place = x.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ordered, ids.gather(1, place)


def _add_logprobs(sampled: SampledTokens, logits: Tensor, count: int) -> None:
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    chosen = sampled.token_ids.clamp(min=0)[:, None]
    sampled.logprobs = logprobs.gather(1, chosen).squeeze(1)
    if count:
        _, ids = top_candidates(logits, min(count, logits.shape[1]))
        sampled.top_ids = ids.int()
        sampled.top_logprobs = logprobs.gather(1, ids)
