"""A benchmark's figures as pictures."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from hermes.bench.figures import Figures
from hermes.bench.groups import Group, groups_of
from hermes.bench.loads import Caches
from hermes.bench.plan import Series
from hermes.bench.records import Exchange, Run
from hermes.bench.report import Report

_SIZE: Final = (8.0, 4.5)  # inches, as wide as a README
_COLOURS: Final = {Caches.ON: "#1f77b4", Caches.OFF: "#b0b0b0"}
_STYLE: Final = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",  # dark pages show them too
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "hermes",  # the same figures give the same file
}
_WINDOW: Final = 16  # requests that a rate over time is a mean of

Axes = Any  # matplotlib's types are skipped, as those of other large packages


def draw(report: Report, directory: Path, suffix: str) -> list[Path]:
    """Draws each picture that the report has runs for.

    suffix: `svg` or `png`.

    Returns the files written. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    groups = groups_of(report.runs)
    alone = [group for group in groups if not group.series]
    series = {each: [group for group in groups if group.series == each] for each in Series}
    names = [group.load.workload for group in alone]
    files = []
    with mpl.rc_context(_STYLE):
        for name in dict.fromkeys(names):
            same = [group for group in alone if group.load.workload == name]
            if any(group.load.rounds > 1 for group in same):
                files.append(_save(_by_round(same), directory / f"ttft-by-round-{name}.{suffix}"))
            cached = [group for group in same if group.caches is Caches.ON]
            if cached:
                files.append(_save(_over_time(cached[0], cached), directory / f"hits-over-time-{name}.{suffix}"))
        if alone:
            files.append(_save(_prefill(alone), directory / f"prefill.{suffix}"))
        for which, members in series.items():
            if members:
                files.append(_save(_SERIES[which](members), directory / f"{which}.{suffix}"))
    return files


def _by_round(groups: Sequence[Group]) -> Figure:
    """Median time to the first text in each round."""
    figure, axes = _axes(f"Time to first text by round: {groups[0].load.workload}", "round", "seconds")
    for group in groups:
        rounds: defaultdict[int, list[float]] = defaultdict(list)
        for each in _answered(group.runs):
            if each.ttft is not None:
                rounds[each.round + 1].append(each.ttft)
        places = sorted(rounds)
        _line(axes, group, places, [statistics.median(rounds[place]) for place in places], groups)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finished(figure, axes)


def _prefill(groups: Sequence[Group]) -> Figure:
    """Prompt tokens sent and computed of each load."""
    figure, axes = _axes("Prompt tokens sent, and those computed", "", "tokens")
    cached = [group for group in groups if group.caches is Caches.ON] or list(groups)
    for place, group in enumerate(cached):
        sent = statistics.median(each.prompt_tokens for each in group.figures)
        computed = statistics.median(each.computed_tokens for each in group.figures)
        axes.bar(place - 0.2, sent, 0.4, color=_COLOURS[Caches.OFF], label="sent" if place == 0 else None)
        axes.bar(place + 0.2, computed, 0.4, color=_COLOURS[Caches.ON], label="computed" if place == 0 else None)
        share = computed / sent if sent else 0.0
        axes.annotate(f"{share:.0%}", (place + 0.2, computed), ha="center", va="bottom")
    axes.set_xticks(range(len(cached)), [_named(group, cached) for group in cached])
    return _finished(figure, axes)


def _over_time(group: Group, among: Sequence[Group]) -> Figure:
    """Hit rates of both caches and the mean hit, over the last few requests of the first run."""
    where = f" on {group.target}" if len({each.target for each in among}) > 1 else ""
    title = f"Hits over the last {_WINDOW} requests: {group.load.workload}{where}"
    figure, axes = _axes(title, "seconds", "share of prompt tokens")
    found = sorted(_answered(group.runs[:1]), key=lambda each: each.begin + each.seconds)
    windows = [found[max(0, end - _WINDOW) : end] for end in range(1, len(found) + 1)]
    ends = [each.begin + each.seconds for each in found]
    axes.plot(ends, [_share(each, lambda one: one.cached_tokens) for each in windows], label="prefix cache")
    if any(each.assembly_cached_tokens is not None for each in found):
        shares = [_share(each, lambda one: one.assembly_cached_tokens or 0) for each in windows]
        axes.plot(ends, shares, label="assembly cache")
    axes.set_ylim(0, 1.02)
    lengths = axes.twinx()
    lengths.grid(visible=False)
    lengths.set_ylabel("tokens")
    means = [_mean([one.cached_tokens for one in each if one.cached_tokens]) for each in windows]
    lengths.plot(ends, means, color="#999999", linestyle=":", label="mean hit (right)")
    lengths.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *lengths.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="lower right")
    return figure


def _prefix(groups: Sequence[Group]) -> Figure:
    figure, axes = _axes("Time to first text as the shared beginning grows", "prompt tokens", "seconds")
    for caches in reversed(Caches):
        members = [group for group in groups if group.caches is caches]
        if not members:
            continue
        sizes = [_mean([each.prompt_tokens for each in _answered(group.runs)]) for group in members]
        first, later = _medians(members, lambda f: f.ttft_first_round), _medians(members, lambda f: f.ttft_later_rounds)
        if caches is Caches.ON:
            axes.plot(sizes, first, marker="o", linestyle="--", color=_COLOURS[caches], label="caches on, first: cold")
            axes.plot(sizes, later, marker="o", color=_COLOURS[caches], label="caches on, later: hits")
        else:
            axes.plot(sizes, later, marker="o", color=_COLOURS[caches], label="caches off")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    return _finished(figure, axes)


def _users(groups: Sequence[Group]) -> Figure:
    figure, axes = _axes("Prompt tokens computed a request as users grow", "users of one system text", "tokens")
    for caches in Caches:
        members = [group for group in groups if group.caches is caches]
        costs = [_mean([each.computed_tokens for each in _answered(group.runs)]) for group in members]
        _grown(axes, caches, [group.load.users for group in members], costs)
    axes.set_ylim(bottom=0)
    return _finished(figure, axes)


def _concurrency(groups: Sequence[Group]) -> Figure:
    figure, axes = _axes("Output as more is asked at once", "requests at a time", "output tokens a second")
    for caches in Caches:
        members = [group for group in groups if group.caches is caches]
        rates = [statistics.median(each.output_tokens_per_second for each in group.figures) for group in members]
        _grown(axes, caches, [group.load.concurrency for group in members], rates)
    axes.set_ylim(bottom=0)
    return _finished(figure, axes)


_SERIES: Final[dict[Series, Callable[[Sequence[Group]], Figure]]] = {
    Series.PREFIX: _prefix,
    Series.USERS: _users,
    Series.CONCURRENCY: _concurrency,
}


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _line(axes: Axes, group: Group, x: Sequence[float], y: Sequence[float], among: Sequence[Group]) -> None:
    several = len({each.target for each in among}) > 1
    axes.plot(x, y, marker="o", color=None if several else _COLOURS[group.caches], label=_named(group, among))


def _grown(axes: Axes, caches: Caches, x: Sequence[float], y: Sequence[float]) -> None:
    """A line over sizes that double."""
    if not x:
        return
    axes.plot(x, y, marker="o", color=_COLOURS[caches], label=f"caches {caches}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(size) for size in x])


def _named(group: Group, among: Sequence[Group]) -> str:
    """What tells a group from the others."""
    parts: list[str] = [group.load.workload] if len({each.load.workload for each in among}) > 1 else []
    parts += [group.target] if len({each.target for each in among}) > 1 else []
    parts += [f"caches {group.caches}"] if len({each.caches for each in among}) > 1 else []
    return ", ".join(parts) or group.load.workload


def _finished(figure: Figure, axes: Axes) -> Figure:
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return file


def _answered(runs: Iterable[Run]) -> list[Exchange]:
    return [each for run in runs for each in run.exchanges if each.failure is None]


def _medians(groups: Sequence[Group], which: Callable[[Figures], Any]) -> list[float]:
    spreads = [[found.median for each in group.figures if (found := which(each)) is not None] for group in groups]
    return [statistics.median(found) if found else float("nan") for found in spreads]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _share(exchanges: Sequence[Exchange], of: Callable[[Exchange], int]) -> float:
    return sum(map(of, exchanges)) / max(1, sum(each.prompt_tokens for each in exchanges))
