"""Runs of the same load, as one: medians over seeds, and ratios of what was compared."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from hermes.bench.figures import Figures, Spread, figures_of
from hermes.bench.loads import Caches, Load
from hermes.bench.records import Run


class Measure(NamedTuple):
    """A figure that runs are compared by."""

    title: str
    unit: str
    of: Callable[[Figures], float | None]
    scale: float = 1.0
    """From the figure's own unit to this one."""
    digits: int = 0


def _median(which: Callable[[Figures], Spread | None]) -> Callable[[Figures], float | None]:
    return lambda figures: None if (found := which(figures)) is None else found.median


def _p95(which: Callable[[Figures], Spread | None]) -> Callable[[Figures], float | None]:
    return lambda figures: None if (found := which(figures)) is None else found.p95


_MS: Final = 1000.0
MEASURES: Final = (
    Measure("TTFT, first round", "ms", _median(lambda f: f.ttft_first_round), _MS),
    Measure("TTFT, later rounds", "ms", _median(lambda f: f.ttft_later_rounds), _MS),
    Measure("TTFT, p95", "ms", _p95(lambda f: f.ttft), _MS),
    Measure("TTFT, outside the engine", "ms", _median(lambda f: f.ttft_outside_engine), _MS, 1),
    Measure("time per token", "ms", _median(lambda f: f.time_per_token), _MS, 1),
    Measure("gap, p95", "ms", _p95(lambda f: f.gap), _MS, 1),
    Measure("output", "tokens/s", lambda f: f.output_tokens_per_second, digits=1),
    Measure("requests answered", "/s", lambda f: f.requests_per_second, digits=2),
    Measure("prompt sent", "tokens", lambda f: f.prompt_tokens),
    Measure("prefill computed", "tokens", lambda f: f.computed_tokens),
    Measure("mean hit", "tokens", lambda f: f.mean_hit_tokens),
    Measure("from the prefix cache", "%", lambda f: f.hit_rate, 100, 1),
    Measure("from the assembly cache", "%", lambda f: f.assembly_hit_rate, 100, 1),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seeds alone."""

    series: str
    load: Load
    target: str
    caches: Caches
    runs: tuple[Run, ...]
    figures: tuple[Figures, ...]
    """Of each run."""

    @property
    def requests(self) -> int:
        """Of all runs together."""
        return sum(each.requests for each in self.figures)

    @property
    def errors(self) -> int:
        """Of all runs together."""
        return sum(each.errors for each in self.figures)

    def median(self, measure: Measure) -> float | None:
        """The median over the runs, in the measure's unit; None where a run has none."""
        found = [measure.of(each) for each in self.figures]
        values = [value * measure.scale for value in found if value is not None]
        return statistics.median(values) if len(values) == len(found) else None


class Ratio(NamedTuple):
    """One group's figure by another's."""

    of_medians: float
    lowest: float
    """Of the runs with the same seed, pair by pair."""
    highest: float


def groups_of(runs: Iterable[Run]) -> list[Group]:
    """The runs by what they have in common, in the order in which they were first met."""
    found: dict[tuple[str, Load, str, Caches], list[Run]] = {}
    for run in runs:
        found.setdefault((run.series, run.load, run.target, run.caches), []).append(run)
    return [Group(*key, tuple(same), tuple(map(figures_of, same))) for key, same in found.items()]


def ratio(measure: Measure, group: Group, to: Group) -> Ratio | None:
    """How a group's figure stands to another's; None where one has none, or the other's is 0."""
    ours, theirs = group.median(measure), to.median(measure)
    if ours is None or not theirs:
        return None
    pairs = [mine / yours for mine, yours in _paired(measure, group, to) if yours]
    return Ratio(ours / theirs, min(pairs), max(pairs)) if pairs else None


def by_load(groups: Iterable[Group]) -> list[list[Group]]:
    """The groups of each load together, those with the caches on first."""
    found: dict[tuple[str, Load], list[Group]] = {}
    for each in groups:
        found.setdefault((each.series, each.load), []).append(each)
    return [sorted(same, key=lambda each: each.caches is Caches.OFF) for same in found.values()]


def _paired(measure: Measure, group: Group, to: Group) -> list[tuple[float, float]]:
    theirs = {run.seed: measure.of(figures) for run, figures in zip(to.runs, to.figures, strict=True)}
    pairs = []
    for run, figures in zip(group.runs, group.figures, strict=True):
        mine, yours = measure.of(figures), theirs.get(run.seed)
        if mine is not None and yours is not None:
            pairs.append((mine, yours))
    return pairs
