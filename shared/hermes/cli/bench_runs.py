"""The work of `hermes bench`: makes the runs, shows how far it is, then tables, file and pictures."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import typer
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hermes.bench.groups import groups_of
from hermes.bench.machine import this_machine
from hermes.bench.plan import Plan, Step
from hermes.bench.records import Run
from hermes.bench.report import SCHEMA, Report, document, read, write
from hermes.bench.specs import EXTRA, Access, Spec
from hermes.bench.suite import execute, facts_of
from hermes.bench.tables import label, tables_of
from hermes.bench.targets import TargetError
from hermes.cli.console import complain, err, fail, note, print_json
from shared.extras import require

__all__ = ["Access", "Destination", "carry_out", "show_again", "spec_of"]

_CONTEXT: Final = ("context_length", "max_model_len")  # as Hermes and vLLM call it
_WIDE: Final = Console(width=400, highlight=False)
"""For tables: a narrower terminal breaks their lines, where rich would leave out figures."""
_CLIENT_SHARE: Final = 0.5
"""Of one processor. A client that takes more is slow to notice what comes, and its figures are partly its own."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the figures go."""

    file: Path | None
    plots: Path | None
    picture_format: str
    as_json: bool = False


class _Watching:
    """Keeps a progress bar, and the report's file as runs end: what was measured is there also after a Ctrl-C."""

    def __init__(self, report: Report, names: Sequence[str], progress: Progress, file: Path | None) -> None:
        self.report = report
        self._names, self._progress, self._file = names, progress, file
        self._bar = progress.add_task("")

    def expect(self, steps: Sequence[Step], facts: Mapping[str, Mapping[str, str | int]]) -> None:
        """All runs that are to come, and what the servers say of themselves."""
        self.report = replace(self.report, targets=facts)
        self._keep()  # where the file cannot be written, that is said before hours have gone
        self._progress.update(self._bar, total=sum(step.load.requests for step in steps))

    def step(self, step: Step) -> None:
        """Tells which run begins, also where there is no terminal to show a bar on."""
        where = f"{self._names[step.target]}, caches {step.caches}"
        self._progress.update(self._bar, description=f"{step.series or step.load.workload}, {where}")
        if not self._progress.console.is_terminal:
            note(f"{label(step.load)}, on {where}, seed {step.seed}")

    def tick(self) -> None:
        """A request has ended."""
        self._progress.advance(self._bar)

    def done(self, run: Run) -> None:
        """Keeps a run."""
        self.report = replace(self.report, runs=(*self.report.runs, run))
        self._keep()

    def trouble(self, what: str) -> None:
        """A line above the bar."""
        complain(what)

    def _keep(self) -> None:
        if self._file is not None:
            write(self.report, self._file)


def spec_of(text: str) -> Spec:
    """The server that an argument names. Raises typer.BadParameter."""
    try:
        return Spec.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


def carry_out(specs: Sequence[Spec], access: Access, plan: Plan, timeout: float | None, to: Destination) -> None:
    """Makes all runs of the plan and shows them; leaves the process with 1 where something failed.

    timeout: seconds that a request may take.

    Raises StartupError where a package is missing, HermesError for an address that can be none.
    """
    if to.plots is not None:
        require(EXTRA, "matplotlib")
    note(f"seed {plan.seeds[0]}" + (f" to {plan.seeds[-1]}" if len(plan.seeds) > 1 else ""))
    try:
        found = uvloop.run(_measure(specs, access, plan, timeout, to))
    except TargetError as error:
        fail(error.message)
    _show(found, to)
    if any(each.failure is not None for run in found.runs for each in run.exchanges):
        raise typer.Exit(1)


def show_again(file: Path, to: Destination) -> None:
    """Shows the report of a file. Raises StartupError for what is none, or where a package is missing."""
    require(EXTRA, "matplotlib")
    try:
        found = read(file)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}.", code=2)
    _show(found, to)


async def _measure(
    specs: Sequence[Spec], access: Access, plan: Plan, request_seconds: float | None, to: Destination
) -> Report:
    """Makes all runs of the plan. Raises TargetError where a server cannot be used at all."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    async with AsyncExitStack() as stack:
        targets = [access.open(spec) for spec in specs]
        for target in targets:
            stack.push_async_callback(target.close)
        progress = stack.enter_context(Progress(*columns, console=err, transient=True, disable=not err.is_terminal))
        report = Report(SCHEMA, tuple(sys.argv[1:]), this_machine(), {})
        watching = _Watching(report, [target.name for target in targets], progress, to.file)
        facts = await facts_of(targets, watching)
        steps = plan.steps(len(targets), _context_length(facts))
        watching.expect(steps, facts)
        await execute(targets, steps, request_seconds, watching)
    return watching.report


def _show(report: Report, to: Destination) -> None:
    """Prints the report and draws its pictures. Raises OSError."""
    if to.as_json:
        print_json(document(report))
    else:
        for table in tables_of(groups_of(report.runs)):
            _WIDE.print(table)
    _complain_of(report)
    if to.file is not None:
        note(f"{to.file} has every request")
    if to.plots is not None:
        from hermes.bench.plots import draw  # noqa: PLC0415 - an optional package

        for file in draw(report, to.plots, to.picture_format):
            note(f"{file} is drawn")


def _complain_of(report: Report) -> None:
    failures = [each.failure for run in report.runs for each in run.exchanges if each.failure is not None]
    for failure in dict.fromkeys(failures):
        complain(f"{failures.count(failure)} requests failed: {failure}")
    warm_up = sum(run.warm_up_failures for run in report.runs)
    if warm_up:
        complain(f"{warm_up} requests of warm-ups failed.")
    busy = max((run.client_cpu_seconds / run.seconds for run in report.runs), default=0.0)
    if busy > _CLIENT_SHARE:
        complain(f"The client itself kept a processor busy for {busy:.0%} of a run: its times are partly its own.")


def _context_length(facts: Mapping[str, Mapping[str, str | int]]) -> int | None:
    """The shortest one that a server told of."""
    told = [length for each in facts.values() for name in _CONTEXT if isinstance(length := each.get(name), int)]
    return min(told, default=None)
