"""The executor's cache on the command line: look at the prefix tree, fill it ahead of use, keep a part of it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import grpc
import typer
from google.protobuf import duration_pb2

from hermes.arguments import bad_argument, build
from hermes.channels import open_channel, unreachable
from hermes.cli import options as opt
from hermes.cli.console import fail, note, out, print_json, text_or_stdin
from hermes.client import DEFAULT_ADDRESS, DEFAULT_EXECUTOR, Client
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared.durations import duration
from shared.errors import from_rpc_error

T = TypeVar("T")

_LONGEST_PIN: Final = 365 * 24 * 3600.0  # seconds; a longer one is surely a slip

_Text = Annotated[str | None, typer.Argument(help="A user message behind the system message; - reads standard input.")]
_Namespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Whose tree; empty is the common one.")]
_Raw = Annotated[bool, typer.Option("--raw", help="Take the message as raw text, without a chat template.")]


def tree(
    *,
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="One namespace; else all.")] = "",
    branches: Annotated[int, typer.Option("--branches", metavar="N", min=1, help="Most branches to list.")] = 20,
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = 10.0,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Show the tree's counters and its largest branches."""
    request = build(
        executor_pb2.DescribeTreeRequest, {"max_branches": "branches"}, namespace=namespace, max_branches=branches
    )
    told = ask(executor, tls_ca, lambda stub: stub.DescribeTree(request, timeout=timeout))
    counters = {field.name: getattr(told, field.name) for field in told.DESCRIPTOR.fields if field.name != "branches"}
    if as_json:
        print_json({**counters, "branches": [_json_of(branch) for branch in told.branches]})
        return
    width = max(map(len, counters))
    for name, value in counters.items():
        out.print(f"{name:{width}}  {value}", markup=False)
    if told.prompt_tokens:
        out.print(f"{'hit rate':{width}}  {told.cached_tokens / told.prompt_tokens:.1%} of prompt tokens")
    if told.branches:
        out.print("")
        for line in _table(told.branches):
            out.print(line, markup=False)


def warm(
    message: _Text = None,
    *,
    system: opt.System = None,
    raw: _Raw = False,
    namespace: _Namespace = "",
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Compute the beginning of a prompt ahead of its use."""
    token_ids = _prefix(message, system, raw, lambda: Client(address, timeout=timeout, tls_ca=tls_ca))
    request = build(executor_pb2.WarmPrefixRequest, token_ids=token_ids, namespace=namespace)
    told = ask(executor, tls_ca, lambda stub: stub.WarmPrefix(request, timeout=timeout))
    note(f"{told.cached_tokens} tokens were there, {told.computed_tokens} were computed")


def pin(
    message: _Text = None,
    *,
    seconds: Annotated[float, typer.Option("--for", metavar="SECONDS", min=0.001, help="How long.")] = 3600.0,
    system: opt.System = None,
    raw: _Raw = False,
    namespace: _Namespace = "",
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Compute the beginning of a prompt and keep it for a time; print the pin's name."""
    token_ids = _prefix(message, system, raw, lambda: Client(address, timeout=timeout, tls_ca=tls_ca))
    request = build(
        executor_pb2.WarmPrefixRequest, token_ids=token_ids, namespace=namespace, pin=_pin_duration(seconds)
    )
    told = ask(executor, tls_ca, lambda stub: stub.WarmPrefix(request, timeout=timeout))
    note(f"{told.cached_tokens} tokens were there, {told.computed_tokens} were computed; kept for {seconds:g} s")
    typer.echo(told.pin_id)


def unpin(
    pin_id: Annotated[str, typer.Argument(help="What `hermes cache pin` printed.")],
    timeout: opt.Timeout = 10.0,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """End a pin."""
    request = build(executor_pb2.UnpinPrefixRequest, pin_id=pin_id)
    ask(executor, tls_ca, lambda stub: stub.UnpinPrefix(request, timeout=timeout))


def _prefix(message: str | None, system: str | None, raw: bool, connect: Callable[[], Client]) -> list[int]:
    """The ids that prompts with this beginning start with."""
    if message is None and system is None:
        fail("Give a --system message, a message, or both: that is the beginning to keep.", code=2)
    if raw and system is not None:
        fail("--raw takes the text as it is, so there is no place for --system.", code=2)
    text = None if message is None else text_or_stdin(message)
    with connect() as client:
        if raw:
            return list(client.assemble(text=text).token_ids)
        turns = [("system", system), ("user", text)]
        messages = [{"role": role, "content": content} for role, content in turns if content is not None]
        return list(client.assemble(messages, add_generation_prompt=False).token_ids)


def ask(executor: str, tls_ca: Path | None, call: Callable[[executor_pb2_grpc.ExecutorAdminStub], T]) -> T:
    """What the executor answers. Raises HermesError."""
    with open_channel(executor, tls_ca) as channel:
        try:
            return call(executor_pb2_grpc.ExecutorAdminStub(channel))
        except grpc.RpcError as error:
            raise unreachable(from_rpc_error(error), "executor", executor) from None


def _pin_duration(seconds: float) -> duration_pb2.Duration:
    if math.isnan(seconds) or seconds > _LONGEST_PIN:
        raise bad_argument("--for", f"cannot be {seconds:g}: a pin lasts a year at most ({_LONGEST_PIN:g} seconds)")
    return duration(seconds)


def _idle(branch: executor_pb2.Branch) -> float:
    return branch.idle.ToTimedelta().total_seconds()


def _json_of(branch: executor_pb2.Branch) -> dict[str, object]:
    fields = [field.name for field in branch.DESCRIPTOR.fields if field.name not in {"idle", "head_token_ids"}]
    return {
        **{name: getattr(branch, name) for name in fields},
        "idle": _idle(branch),
        "head_token_ids": list(branch.head_token_ids),
    }


def _table(branches: Sequence[executor_pb2.Branch]) -> list[str]:
    """A line of titles, then one of each branch; the namespace stands last, since it may be long."""
    rows = [("branch", "from", "start", "tokens", "children", "running", "hits", "idle s", "", "namespace")]
    rows += [
        (
            str(branch.id),
            str(branch.parent_id),
            str(branch.start),
            str(branch.tokens),
            str(branch.children),
            str(branch.running_requests),
            str(branch.hits),
            f"{_idle(branch):.0f}",
            "pinned" if branch.pinned else "",
            branch.namespace,
        )
        for branch in branches
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"  {row[-1]}".rstrip()
        for row in rows
    ]
