"""A benchmark's file: JSON with a version, the machine, the servers, and every run with every request."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hermes.bench.figures import figures_of
from hermes.bench.machine import Machine
from hermes.bench.records import Run
from shared.errors import StartupError

SCHEMA: Final = "hermes-bench/1"
"""Its number goes up when a field changes its meaning or goes away; new fields may come without that."""

_DIGITS: Final = 6  # of a second: as fine as the clock of a request is worth


@dataclass(frozen=True, slots=True)
class Report:
    """All that one call of the benchmark measured."""

    schema: str
    command: tuple[str, ...]
    """The arguments that it was called with."""
    machine: Machine
    targets: Mapping[str, Mapping[str, str | int]]
    """What each server says of itself; empty where it could not be asked."""
    runs: tuple[Run, ...] = field(default=())


def document(report: Report) -> dict[str, Any]:
    """The report as JSON has it; beside each run stand its figures, for readers without statistics of their own."""
    fields = asdict(report)
    for each, run in zip(fields["runs"], report.runs, strict=True):
        each["figures"] = asdict(figures_of(run))
    rounded: dict[str, Any] = _rounded(fields)
    return rounded


def write(report: Report, file: Path) -> None:
    """Replaces the file in one step. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(file.name + ".draft")
    draft.write_text(json.dumps(document(report), indent=1) + "\n")
    draft.replace(file)


def read(file: Path) -> Report:
    """The report of a file; figures are worked out anew from the requests.

    Raises StartupError for what is no such file, or one of another version; OSError where it cannot be read.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - slow to import, and only read needs it

    text = file.read_bytes()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{file} is no report of hermes bench: it is not JSON ({error}).") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise StartupError(f"{file} is no report that can be read here: its schema is {schema!r}, not {SCHEMA!r}.")
    try:
        return TypeAdapter(Report).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise StartupError(f"{file} is no whole report of hermes bench: {place}: {first['msg']}.") from error


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, _DIGITS)
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
    return value
