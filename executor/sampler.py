"""Logits to tokens for all rows of a step in one pass, each row by its own settings and its own random numbers.

A row draws one uniform number per token, computed from its seed and the token's index alone, and takes the token
whose share of the cumulative distribution it falls in. So a row's tokens depend neither on its neighbours nor on
having been preempted and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from executor.requests import Sampling

_CANDIDATES: Final = 1024  # nearly always hold the nucleus; a whole sort of 49k logits costs a CPU 8 ms, this 1 ms
_GREEDY_BELOW: Final = 1e-5  # temperatures under this overflow fp32 logits and mean the likeliest token anyway
_GROUP: Final = 256  # tokens that a draw looks at together: about the root of a vocabulary
_MINUS_INFINITY: Final = float("-inf")


class TokenHistory:
    """Which tokens a sequence has seen, kept only where a penalty asks for it.

    `seen`: `[vocab]` bool, prompt and completion; `counts`: `[vocab]` float32, completion only.
    """

    @torch.inference_mode()
    def __init__(self, prompt: Rows[int], generated: Rows[int], vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        for token in generated:
            self.add(token)

    @torch.inference_mode()
    def add(self, token: int) -> None:
        """Takes a generated token into account."""
        self.seen[token] = True
        self.counts[token] += 1.0

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        """Whether the settings hold a penalty at all."""
        return (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )


class TokenRules:
    """A request's rules on single tokens, made into tensors once: biases, allowed ids, those that end the answer."""

    def __init__(self, sampling: Sampling, stops: Iterable[int], device: torch.device) -> None:
        def ids(tokens: Iterable[int]) -> Tensor:
            return torch.tensor(list(tokens), dtype=torch.int64, device=device)

        self.biased = ids(token for token, _ in sampling.logit_bias)
        self.biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32, device=device)
        self.allowed = ids(sampling.allowed)
        """Empty allows all."""
        self.stops = ids(stops)

    def apply(self, logits: Tensor, *, early: bool) -> None:
        """Changes one row's `[vocab]` logits. `early`: no token that ends the answer may come yet."""
        if len(self.biased):
            logits[self.biased] += self.biases
        if early:
            logits[self.stops] = _MINUS_INFINITY
        if len(self.allowed):
            kept = logits[self.allowed]
            logits.fill_(_MINUS_INFINITY)
            logits[self.allowed] = kept

    @staticmethod
    def needed(sampling: Sampling, *, early: bool) -> bool:
        """Whether there is anything to apply."""
        return bool(early or sampling.logit_bias or sampling.allowed)


class SampleRow(NamedTuple):
    """One row of logits to choose from."""

    sampling: Sampling
    seed: int
    """The sample's own, which with `generated` makes its random number."""
    generated: int
    """How many tokens the sequence has generated before this one."""
    history: TokenHistory | None = None
    rules: TokenRules | None = None
    early: bool = False
    """Whether the tokens that end an answer must not come yet: before `min_tokens`."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Rows[SampleRow]) -> list[int]:
    """Chooses one token per row from `[rows, vocab]` logits, which are overwritten."""
    for i, row in enumerate(rows):
        if row.rules is not None:
            row.rules.apply(logits[i], early=row.early)
    _penalize(logits, rows)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= _GREEDY_BELOW]
    chosen = logits.new_empty(len(rows), dtype=torch.int64) if len(drawn) == len(rows) else logits.argmax(-1)
    if drawn:
        settings = [rows[i].sampling for i in drawn]
        some = torch.tensor(drawn, device=logits.device)
        scaled = logits[some] / _column(settings, lambda s: s.temperature, logits)
        chosen[some] = _draw(_filter(scaled, settings), [(rows[i].seed, rows[i].generated) for i in drawn])
    return [int(token) for token in chosen.tolist()]


def _penalize(logits: Tensor, rows: Rows[SampleRow]) -> None:
    """Repetition penalty (CTRL, section 4.1) over prompt and completion; presence and frequency over the completion."""
    some = [i for i, row in enumerate(rows) if row.history is not None]
    if not some:
        return
    settings = [rows[i].sampling for i in some]
    histories = [history for row in rows if (history := row.history) is not None]
    index = torch.tensor(some, device=logits.device)
    seen, counts = torch.stack([h.seen for h in histories]), torch.stack([h.counts for h in histories])
    part = logits[index]
    repetition = _column(settings, lambda s: s.repetition_penalty, logits)
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= (counts > 0) * _column(settings, lambda s: s.presence_penalty, logits)
    part -= counts * _column(settings, lambda s: s.frequency_penalty, logits)
    logits[index] = part


def _filter(scaled: Tensor, settings: Rows[Sampling]) -> Tensor:
    """Applies top-k, then top-p, then min-p, in the order and with the ties of transformers' warpers."""
    vocab = scaled.shape[-1]
    few = min(_CANDIDATES, vocab)
    some = [i for i, s in enumerate(settings) if 0 < s.top_k < vocab or s.top_p < 1.0]
    missed = _narrow(scaled, [i for i in some if settings[i].top_k <= few], settings, few)
    _narrow(scaled, [i for i in some if settings[i].top_k > few] + missed, settings, vocab)
    if any(s.min_p > 0.0 for s in settings):
        shares = scaled.softmax(-1, dtype=torch.float32)
        least = shares.amax(-1, keepdim=True) * _column(settings, lambda s: s.min_p, shares)
        scaled = scaled.masked_fill(shares < least, _MINUS_INFINITY)
    return scaled


def _narrow(scaled: Tensor, some: list[int], settings: Rows[Sampling], candidates: int) -> list[int]:
    """Applies top-k and top-p to some rows in place, by a look at so many of their likeliest tokens.

    Returns the rows for which those were too few; they are left as they were. Each row is treated as it would be alone.
    """
    if not some:
        return []
    chosen = [settings[i] for i in some]
    index = torch.tensor(some, device=scaled.device)
    part = scaled[index]
    values, order = part.topk(candidates)
    last = torch.tensor([min(s.top_k or candidates, candidates) - 1 for s in chosen], device=scaled.device)[:, None]
    limited = torch.tensor([[s.top_k > 0] for s in chosen], device=scaled.device)
    threshold = values.gather(1, last).masked_fill_(~limited, _MINUS_INFINITY)
    part = part.masked_fill(part < threshold, _MINUS_INFINITY)  # ties with the last are kept
    values = values.masked_fill(values < threshold, _MINUS_INFINITY)

    likeliest = values[:, :1]
    total = (part - likeliest).exp().sum(-1, keepdim=True, dtype=torch.float64)
    before = (values - likeliest).exp().cumsum(-1, dtype=torch.float64).roll(1, -1)  # of all that are likelier
    before[:, 0] = 0.0
    top_p = _column(chosen, lambda s: s.top_p, total)
    outside = total - before <= (1.0 - top_p) * total  # by the small rest, in which rounding does not show
    outside[:, 0] = False
    nucleus = torch.full_like(part, _MINUS_INFINITY).scatter_(1, order, values.masked_fill(outside, _MINUS_INFINITY))
    part = torch.where(top_p < 1.0, nucleus, part)

    found = outside[:, -1] | values[:, -1].isneginf() | (top_p[:, 0] >= 1.0)
    if candidates == scaled.shape[-1] or bool(found.all()):
        scaled[index] = part
        return []
    scaled[index[found]] = part[found]
    return [i for i, done in zip(some, found.tolist(), strict=True) if not done]


def _draw(scaled: Tensor, seeds: list[tuple[int, int]]) -> Tensor:
    """Inverse transform sampling: `[rows]` token ids. Sums in float64, so that large vocabularies lose nothing.

    Looks for the group of tokens that the number falls in, and there for the token: running sums of whole vocabularies
    would take as long as a layer of the model.
    """
    rows, vocab = scaled.shape
    shares = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    groups = functional.pad(shares, (0, -vocab % _GROUP)).view(rows, -1, _GROUP)
    each = groups.sum(-1, dtype=torch.float64)
    sums = each.cumsum(-1)
    target = torch.from_numpy(uniforms(seeds)).to(scaled.device)[:, None] * sums[:, -1:]
    group = _find(sums, target)
    inside = groups[torch.arange(rows, device=scaled.device), group[:, 0]].cumsum(-1, dtype=torch.float64)
    token = group * _GROUP + _find(inside, target - (sums - each).gather(1, group))
    return token[:, 0].clamp_(max=vocab - 1)  # logits that are no numbers would give an id behind the last one


def _find(cumulative: Tensor, target: Tensor) -> Tensor:
    """Where `[rows, 1]` targets fall in running sums: never behind their end, nor where nothing was added."""
    total = cumulative[:, -1:]
    target = torch.minimum(target.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


def uniforms(seeds: Rows[tuple[int, int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One number in [0, 1) for each (seed, index of the token): SplitMix64 (Steele, Lea and Flood, 2014)."""
    pairs = np.array(seeds, dtype=np.uint64).reshape(-1, 2)
    with np.errstate(over="ignore"):
        state = _mixed(pairs[:, 0]) + (pairs[:, 1] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _column(settings: Rows[Sampling], value: Callable[[Sampling], float], like: Tensor) -> Tensor:
    """A setting of each row as `[rows, 1]`."""
    return torch.tensor([[value(s)] for s in settings], dtype=like.dtype, device=like.device)
