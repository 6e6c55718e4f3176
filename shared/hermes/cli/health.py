"""`hermes health`: whether the services are ready."""

from typing import Annotated

import typer

from hermes.cli import options as opt
from hermes.cli.console import out, print_json
from hermes.client import DEFAULT_ADDRESS, DEFAULT_EXECUTOR
from hermes.health import ASSEMBLER, EXECUTOR, GENERATE, ServiceHealth, probe

_ALL = [ASSEMBLER, GENERATE, EXECUTOR]


def health(
    services: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=f"Health names; else {', '.join(_ALL)}.")
    ] = None,
    as_json: opt.AsJson = False,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Ask both services whether they are ready.

    The exit code is 1 when one of them is not.
    """
    found = [probe(name, executor if name.startswith(EXECUTOR) else address, tls_ca) for name in services or _ALL]
    if as_json:
        print_json({each.service: {"address": each.address, "state": each.state} for each in found})
    else:
        for each in found:
            _print(each)
    if not all(each.serving for each in found):
        raise typer.Exit(1)


def _print(health: ServiceHealth) -> None:
    colour = "green" if health.serving else "red"
    out.print(f"[{colour}]{health.state:12}[/] {health.service:28} {health.address}")
