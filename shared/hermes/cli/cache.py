"""`hermes cache`: both caches in one picture, the assembler's of prompts and the executor's prefix tree."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer
from google.protobuf.message import Message

from hermes.arguments import build
from hermes.channels import open_channel, unreachable
from hermes.cli import insights, prefix_tree
from hermes.cli import options as opt
from hermes.cli.console import complain, note, out, print_json
from hermes.client import DEFAULT_ADDRESS, DEFAULT_EXECUTOR
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, executor_pb2
from shared.errors import HermesError, from_rpc_error

T = TypeVar("T")

app = typer.Typer(
    help="Look at both caches and empty them: assembled prompts, and the prefix tree, which can be warmed and pinned.",
    no_args_is_help=True,
)


class Which(StrEnum):
    """One of the caches."""

    PROMPTS = "prompts"
    TREE = "tree"


@app.command()
def stats(
    *,
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = 10.0,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Show how often each cache had what was asked for. What cannot be reached is said, and the exit code is 1."""
    prompts = _told(
        lambda: _ask(
            address,
            tls_ca,
            lambda stub: stub.GetAssemblyCacheStats(assembler_pb2.GetAssemblyCacheStatsRequest(), timeout=timeout),
        )
    )
    request = executor_pb2.DescribeTreeRequest(max_branches=1)
    tree = _told(lambda: prefix_tree.ask(executor, tls_ca, lambda stub: stub.DescribeTree(request, timeout=timeout)))
    counted = {"prompts": _counters(prompts), "tree": _counters(tree)}
    if as_json:
        print_json({**counted})
    else:
        for name, counters in counted.items():
            if counters is not None:
                _show(name, counters)
    if None in counted.values():
        raise typer.Exit(1)


@app.command()
def insight(
    *,
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="One namespace; else all.")] = "",
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = 10.0,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Tell what keeps the caches from hitting: the warnings of recent prompts, with their remedies."""
    request = build(assembler_pb2.GetInsightRequest, namespace=namespace)
    told = _told(lambda: _ask(address, tls_ca, lambda stub: stub.GetInsight(request, timeout=timeout)))
    if told is None:
        raise typer.Exit(1)
    if as_json:
        print_json(insights.as_json(told))
    else:
        insights.show(told)


@app.command()
def flush(
    *,
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="One namespace; else all.")] = "",
    only: Annotated[Which | None, typer.Option("--only", help="One of the caches; else both.")] = None,
    timeout: opt.Timeout = 10.0,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Forget assembled prompts, and drop every block of the prefix tree, pins too. What runs goes on."""
    done = True
    if only is not Which.TREE:
        request = build(assembler_pb2.FlushAssemblyCacheRequest, namespace=namespace)
        told = _told(lambda: _ask(address, tls_ca, lambda stub: stub.FlushAssemblyCache(request, timeout=timeout)))
        done = told is not None
        if told is not None:
            note(f"{told.removed} prompts and beginnings are forgotten")
    if only is not Which.PROMPTS:
        flushed = build(executor_pb2.FlushTreeRequest, namespace=namespace)
        freed = _told(lambda: prefix_tree.ask(executor, tls_ca, lambda stub: stub.FlushTree(flushed, timeout=timeout)))
        done = done and freed is not None
        if freed is not None:
            note(f"{freed.freed_blocks} blocks were freed")
    if not done:
        raise typer.Exit(1)


app.command()(prefix_tree.tree)
app.command()(prefix_tree.warm)
app.command()(prefix_tree.pin)
app.command()(prefix_tree.unpin)


def _told(ask: Callable[[], T]) -> T | None:
    """What a service answers; None where it does not, which is said."""
    try:
        return ask()
    except HermesError as error:
        complain(error.message)
        return None


def _ask(address: str, tls_ca: Path | None, call: Callable[[assembler_pb2_grpc.AssemblerAdminStub], T]) -> T:
    with open_channel(address, tls_ca) as channel:
        try:
            return call(assembler_pb2_grpc.AssemblerAdminStub(channel))
        except grpc.RpcError as error:
            raise unreachable(from_rpc_error(error), "assembler", address) from None


def _counters(told: Message | None) -> dict[str, int] | None:
    if told is None:
        return None
    return {field.name: getattr(told, field.name) for field in told.DESCRIPTOR.fields if field.name != "branches"}


def _show(name: str, counters: dict[str, int]) -> None:
    """A cache's counters, its hit rate in tokens last."""
    out.print(f"{name}:")
    width = max(map(len, counters))
    for counter, value in counters.items():
        out.print(f"  {counter:{width}}  {value}", markup=False)
    tokens = counters.get("tokens" if name == Which.PROMPTS else "prompt_tokens")
    if tokens:
        out.print(f"  {'hit rate':{width}}  {counters['cached_tokens'] / tokens:.1%} of prompt tokens")
