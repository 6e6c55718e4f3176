"""What a benchmark runs, and in which order."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from hermes.bench.loads import Caches, Load, Wishes, Workload
from hermes.bench.prose import TOKENS_PER_WORD


class Series(StrEnum):
    """Loads that differ in one thing, which grows."""

    PREFIX = "prefix"
    """The tokens that all prompts begin with."""
    USERS = "users"
    """Users of the same system text, each with one question."""
    CONCURRENCY = "concurrency"
    """Requests at a time."""


class Step(NamedTuple):
    """One run to make."""

    target: int
    """Place in the list of servers."""
    load: Load
    caches: Caches
    seed: int
    series: str = ""


_PREFIX_TOKENS: Final = (100, 500, 1000, 2000, 4000, 8000)
_PREFIX_QUESTION_WORDS: Final = 20
_PREFIX_ROUNDS: Final = 4
_PREFIX_ANSWER_TOKENS: Final = 8  # the beginning is what is looked at here, not the answer
_PREFIX_ROOM: Final = 120  # tokens of the context for template, question and answer
_POWERS: Final = (1, 2, 4, 8, 16, 32, 64)
_AT_A_TIME: Final = 8  # users of the series of users


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a benchmark runs."""

    workloads: tuple[Workload, ...]
    series: tuple[Series, ...]
    wishes: Wishes
    caches: tuple[Caches, ...]
    seeds: tuple[int, ...]
    """One for each time that every load is run."""

    def steps(self, targets: int, context_length: int | None) -> list[Step]:
        """All runs, in order.

        targets: how many servers there are.
        context_length: of the model, in tokens, where it is known.
        """
        alone = [("", self.wishes.of(workload)) for workload in self.workloads]
        growing = [(each, load) for each in self.series for load in loads_of(each, self.wishes, context_length)]
        return list(self._alternating([*alone, *growing], targets))

    def _alternating(self, loads: Sequence[tuple[str, Load]], targets: int) -> Iterator[Step]:
        # What is compared runs one right after the other with the same seed, and the order turns around with each
        # seed: a machine that gets slower or faster meanwhile does so for all alike.
        for place, seed in enumerate(self.seeds):
            for series, load in loads:
                pairs = list(itertools.product(range(targets), self.caches))
                for target, setting in pairs if place % 2 == 0 else reversed(pairs):
                    yield Step(target, load, setting, seed, series)


def loads_of(series: Series, wishes: Wishes, context_length: int | None) -> list[Load]:
    """The loads of a series, in growing order.

    wishes: hold for all that the series does not set itself.
    context_length: of the model, in tokens; prefixes that it has no room for are left out. None knows none.
    """
    base = wishes.of(Workload.QUESTIONS)
    match series:
        case Series.PREFIX:
            largest = _PREFIX_TOKENS[-1] if context_length is None else context_length - _PREFIX_ROOM
            return [
                replace(
                    base,
                    users=1,
                    concurrency=1,
                    rounds=wishes.rounds or _PREFIX_ROUNDS,
                    words=round(tokens / TOKENS_PER_WORD),
                    question=_PREFIX_QUESTION_WORDS,
                    max_tokens=wishes.max_tokens or _PREFIX_ANSWER_TOKENS,
                )
                for tokens in _PREFIX_TOKENS
                if tokens <= largest
            ]
        case Series.USERS:
            rounds, at_a_time = wishes.rounds or 1, wishes.concurrency or _AT_A_TIME
            return [replace(base, users=many, rounds=rounds, concurrency=min(many, at_a_time)) for many in _POWERS]
        case Series.CONCURRENCY:
            rounds = wishes.rounds or 1
            return [replace(base, users=2 * many, rounds=rounds, concurrency=many) for many in _POWERS]
