"""A benchmark's figures as tables for a terminal."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from rich import box
from rich.console import Group as Together
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hermes.bench.groups import MEASURES, Group, Measure, Ratio, by_load, ratio
from hermes.bench.loads import Load

_NONE: Final = "–"
_GROWING: Final = ("TTFT, first round", "TTFT, later rounds", "output", "prompt sent", "prefill computed")


def tables_of(groups: Sequence[Group]) -> Iterable[RenderableType]:
    """A table for each load that stands alone, and one for each series; each below its title."""
    for series, members in groupby(groups, key=lambda each: each.series):
        loads = by_load(members)
        if series:
            yield _series_table(series, loads)
        else:
            yield from map(_load_table, loads)


def label(load: Load) -> str:
    """What a load is called."""
    return (
        f"{load.workload}: {load.users} users × {load.rounds} rounds, {load.concurrency} at once, "
        f"{load.words} + {load.question} words, answers up to {load.max_tokens} tokens"
    )


def _load_table(same: Sequence[Group]) -> RenderableType:
    """A column for each server and setting of the caches, and how the first one's figures stand to the others'."""
    first, *others = same
    seeds = len(first.runs)
    title = label(first.load) + (f"; medians of {seeds} runs" if seeds > 1 else "")
    table = _table("")
    for each in same:
        table.add_column(_column(each, same), justify="right")
    for other in others:
        table.add_column(f"{_column(first, same)}\n÷ {_column(other, same)}", justify="right")
    table.add_row("requests", *(str(each.requests) for each in same))
    table.add_row("errors", *map(_errors, same))
    for measure in MEASURES:
        figures = [_number(measure, each.median(measure)) for each in same]
        if any(each != _NONE for each in figures):
            ratios = [_ratio(measure, ratio(measure, first, other)) for other in others]
            table.add_row(f"{measure.title}, {measure.unit}", *figures, *ratios)
    return _titled(title, table)


def _series_table(series: str, loads: Sequence[Sequence[Group]]) -> RenderableType:
    """A row for each load, server and setting of the caches."""
    members = [each for same in loads for each in same]
    table = _table("users", "at once", "words", "")
    shown = [measure for measure in MEASURES if measure.title in _GROWING]
    for measure in shown:
        table.add_column(f"{measure.title}\n{measure.unit}", justify="right")
    table.add_column("errors", justify="right")
    for each in members:
        load = each.load
        sizes = [str(load.users), str(load.concurrency), str(load.words), _column(each, members)]
        table.add_row(*sizes, *(_number(measure, each.median(measure)) for measure in shown), _errors(each))
    return _titled(f"{series}: how figures change as it grows", table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _titled(title: str, table: Table) -> RenderableType:
    return Together(Text(title, style="bold"), table)  # a table's own title is folded to its width


def _column(group: Group, among: Sequence[Group]) -> str:
    """What tells a group from the others."""
    names = [group.target] if len({each.target for each in among}) > 1 else []
    settings = [f"caches {group.caches}"] if len({each.caches for each in among}) > 1 or not names else []
    return "\n".join([*names, *settings])


def _number(measure: Measure, value: float | None) -> str:
    return _NONE if value is None else f"{value:,.{measure.digits}f}"


def _errors(group: Group) -> str:
    return f"[red]{group.errors}[/]" if group.errors else "0"


def _ratio(measure: Measure, found: Ratio | None) -> str:
    if found is None or measure.unit == "%":  # shares are read beside each other
        return _NONE
    if found.lowest == found.highest:
        return f"×{found.of_medians:.2f}"
    return f"×{found.of_medians:.2f} ({found.lowest:.2f}–{found.highest:.2f})"
