"""`hermes bench`: what callers of a chat server feel, with the caches on and off, and beside another server."""

import json
import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hermes.bench.loads import Caches, Wishes, Workload
from hermes.bench.plan import Plan, Series
from hermes.cli import options as opt
from hermes.client import DEFAULT_ADDRESS, DEFAULT_EXECUTOR

app = typer.Typer(
    help="Measure what callers feel: times to the first text, pace, throughput, and what the caches save.",
    no_args_is_help=True,
)

_ALL: Final = "all"
_LOADS: Final = tuple(Workload)
_SEEDS: Final = 2**31  # drawn where none is given: no run then finds what another one left in a cache


class PictureFormat(StrEnum):
    """Files that pictures can be."""

    SVG = "svg"
    PNG = "png"


Users = Annotated[int | None, typer.Option("--users", "-u", metavar="N", min=1, help="Conversations of each run.")]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", metavar="N", min=1, help="Requests of each user.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", "-c", metavar="N", min=1, help="Users at a time, each with one request.")
]
Words = Annotated[int | None, typer.Option("--words", metavar="N", min=1, help="Words of the system text.")]
Question = Annotated[int | None, typer.Option("--question", metavar="N", min=1, help="New words in each round.")]
Answer = Annotated[int | None, typer.Option("--max-tokens", "-o", metavar="N", min=1, help="Longest answer.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Let every answer have that length.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Of the first run; the next have those after it. Else drawn anew."),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME", help="Of all requests, and left as it is; else one for each run."),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Its name on the OpenAI server; else the first there.")
]
Extra = Annotated[
    str, typer.Option("--extra", metavar="JSON", help="Fields to add to requests on the OpenAI server, an object.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write every request's figures as JSON.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIRECTORY", help="Draw pictures there.")]
Format = Annotated[PictureFormat, typer.Option("--format", help="Of the pictures.")]


@app.command()
def run(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOAD]...",
            help=f"Workloads ({', '.join(Workload)}) and series of growing loads ({', '.join(Series)}); "
            f"{_ALL} is everything. Else the workloads.",
        ),
    ] = None,
    *,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="SERVER", help="hermes:HOST:PORT or openai:URL; else HERMES_ADDRESS."),
    ] = None,
    caches: Annotated[
        list[Caches] | None,
        typer.Option("--caches", help="Settings of the caches, may be repeated; else both where they can be set."),
    ] = None,
    users: Users = None,
    rounds: Rounds = None,
    concurrency: Concurrency = None,
    words: Words = None,
    question: Question = None,
    max_tokens: Answer = None,
    ignore_eos: IgnoreEos = False,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Runs of each, with different seeds.")] = 1,
    seed: Seed = None,
    namespace: Namespace = None,
    model: Model = None,
    extra: Extra = "{}",
    timeout: opt.Timeout = 600.0,
    file: Out = None,
    plots: Plots = None,
    picture_format: Format = PictureFormat.SVG,
    as_json: opt.AsJson = False,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Run loads on one server, with the caches on and off in turn.

    The exit code is 1 where a request failed.
    """
    from hermes.cli import bench_runs  # noqa: PLC0415 - slow to import, and no other command needs it

    spec = bench_runs.spec_of(target or f"hermes:{address}")
    workloads, series = _chosen(what or [])
    settings = tuple(dict.fromkeys(caches or Caches)) if spec.switches_caches else (Caches.ON,)
    if caches and Caches.OFF in caches and not spec.switches_caches:
        raise typer.BadParameter("a request on such a server cannot be kept out of its cache.", param_hint="--caches")
    wishes = Wishes(users, rounds, concurrency, words, question, max_tokens, ignore_eos)
    access = bench_runs.Access(executor, tls_ca, namespace, model, _object(extra))
    plan = Plan(workloads, series, wishes, settings, _seeds(seed, runs))
    destination = bench_runs.Destination(file, plots, picture_format, as_json)
    bench_runs.carry_out([spec], access, plan, timeout, destination)


@app.command()
def compare(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="SERVER SERVER...", help="Each hermes:HOST:PORT or openai:URL; ratios are the first's."),
    ],
    *,
    workload: Annotated[
        list[Workload] | None, typer.Option("--workload", "-w", help="May be repeated; else service.")
    ] = None,
    users: Users = None,
    rounds: Rounds = None,
    concurrency: Concurrency = None,
    words: Words = None,
    question: Question = None,
    max_tokens: Answer = None,
    ignore_eos: IgnoreEos = False,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=3, help="Runs on each, with different seeds; at least 3.")
    ] = 3,
    seed: Seed = None,
    namespace: Namespace = None,
    model: Model = None,
    extra: Extra = "{}",
    timeout: opt.Timeout = 600.0,
    file: Out = None,
    plots: Plots = None,
    picture_format: Format = PictureFormat.SVG,
    as_json: opt.AsJson = False,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Run the same loads on several servers in turn, and show medians and ratios.

    Caches are on, as servers have them. The exit code is 1 where a request failed.
    """
    from hermes.cli import bench_runs  # noqa: PLC0415 - as above

    specs = [bench_runs.spec_of(each) for each in targets]
    if len(set(specs)) < 2:  # noqa: PLR2004 - one server has nothing beside it
        raise typer.BadParameter("give at least two different servers.", param_hint="SERVER")
    wishes = Wishes(users, rounds, concurrency, words, question, max_tokens, ignore_eos)
    access = bench_runs.Access(executor, tls_ca, namespace, model, _object(extra))
    plan = Plan(tuple(workload or [Workload.SERVICE]), (), wishes, (Caches.ON,), _seeds(seed, runs))
    destination = bench_runs.Destination(file, plots, picture_format, as_json)
    bench_runs.carry_out(list(dict.fromkeys(specs)), access, plan, timeout, destination)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --out wrote.")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the pictures go.")],
    *,
    picture_format: Format = PictureFormat.SVG,
) -> None:
    """Show the tables of an earlier benchmark again, and draw its pictures."""
    from hermes.cli import bench_runs  # noqa: PLC0415 - as above

    bench_runs.show_again(file, bench_runs.Destination(None, directory, picture_format))


def _chosen(names: Sequence[str]) -> tuple[tuple[Workload, ...], tuple[Series, ...]]:
    known = [*Workload, *Series]
    for name in names:
        if name not in (*known, _ALL):
            raise typer.BadParameter(f"{name!r} is no load: there are {', '.join(known)} and {_ALL}.")
    if not names:
        return _LOADS, ()
    chosen = known if _ALL in names else names
    return tuple(each for each in Workload if each in chosen), tuple(each for each in Series if each in chosen)


def _seeds(first: int | None, runs: int) -> tuple[int, ...]:
    begin = secrets.randbelow(_SEEDS) if first is None else first
    return tuple(range(begin, begin + runs))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}.", param_hint="--extra") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("give a JSON object.", param_hint="--extra")
    return found
