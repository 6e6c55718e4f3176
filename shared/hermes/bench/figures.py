"""What is made of a run's requests: medians, percentiles, rates."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hermes.bench.records import Exchange, Run

_TWENTIETHS: Final = 20
_TAIL_SAMPLES: Final = 20
"""With fewer, no sample is expected beyond the 95th percentile: what would be called so is only the maximum."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How values lie, in their own unit."""

    samples: int
    median: float
    p95: float | None
    """None for fewer than 20 samples."""
    maximum: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers. Times are seconds; a figure that no request gave is None."""

    requests: int
    errors: int
    ttft: Spread | None
    ttft_first_round: Spread | None
    ttft_later_rounds: Spread | None
    ttft_outside_engine: Spread | None
    """What assembling, the ways between the processes, and waiting for a whole character add."""
    time_per_token: Spread | None
    gap: Spread | None
    """Between two pieces of text of one answer."""
    output_tokens_per_second: float
    requests_per_second: float
    """Answered ones."""
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens less cached ones."""
    completion_tokens: int
    hit_rate: float | None
    """Share of prompt tokens that the prefix cache had."""
    mean_hit_tokens: float | None
    """Of the requests that had a hit."""
    assembly_hit_rate: float | None
    """Share of prompt tokens that the assembly cache had."""


def figures_of(run: Run) -> Figures:
    """The run's figures: times and tokens of the requests that were answered, and how many were not."""
    answered = [each for each in run.exchanges if each.failure is None]
    prompt = sum(each.prompt_tokens for each in answered)
    completion = sum(each.completion_tokens for each in answered)
    hits = [each.cached_tokens for each in answered if each.cached_tokens]
    assembled = [each.assembly_cached_tokens for each in answered if each.assembly_cached_tokens is not None]
    return Figures(
        requests=len(run.exchanges),
        errors=len(run.exchanges) - len(answered),
        ttft=_ttft(answered),
        ttft_first_round=_ttft(each for each in answered if each.round == 0),
        ttft_later_rounds=_ttft(each for each in answered if each.round > 0),
        ttft_outside_engine=spread(
            seconds for each in answered if (seconds := each.seconds_outside_engine) is not None
        ),
        time_per_token=spread(pace for each in answered if (pace := each.seconds_per_token) is not None),
        gap=spread(later - earlier for each in answered for earlier, later in pairwise(each.pieces)),
        output_tokens_per_second=completion / run.seconds,
        requests_per_second=len(answered) / run.seconds,
        prompt_tokens=prompt,
        computed_tokens=sum(each.computed_tokens for each in answered),
        completion_tokens=completion,
        hit_rate=sum(hits) / prompt if prompt else None,
        mean_hit_tokens=sum(hits) / len(hits) if hits else None,
        assembly_hit_rate=sum(assembled) / prompt if assembled and prompt else None,
    )


def spread(values: Iterable[float]) -> Spread | None:
    """How values lie; None without any.

    The 95th percentile is estimated for all requests that might have been sent, of which these are a sample
    (`statistics.quantiles`, exclusive): the largest of 19 values would lie on it, and not beyond.
    """
    found = list(values)
    if not found:
        return None
    tail = statistics.quantiles(found, n=_TWENTIETHS)[-1] if len(found) >= _TAIL_SAMPLES else None
    return Spread(len(found), statistics.median(found), tail, max(found))


def _ttft(exchanges: Iterable[Exchange]) -> Spread | None:
    return spread(seconds for each in exchanges if (seconds := each.ttft) is not None)
