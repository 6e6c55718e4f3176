"""`hermes model`: prepare a model, describe the one that is served."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import grpc
import typer

from hermes.channels import open_channel, unreachable
from hermes.cli import options as opt
from hermes.cli.console import note, out, print_json
from hermes.client import DEFAULT_EXECUTOR
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared import models
from shared.errors import from_rpc_error

app = typer.Typer(help="Prepare a model, or describe the one that is served.", no_args_is_help=True)


@app.command()
def prepare(
    model: Annotated[
        str, typer.Argument(help="A directory, a hub name such as org/name, or the packaged model.")
    ] = models.PACKAGED_MODEL,
) -> None:
    """Make sure that a model is on this machine, and print its directory."""
    with _sigterm_unwinds():
        directory = models.prepare(model, note)
    typer.echo(directory)


@app.command()
def info(
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = 10.0,
    executor: opt.ExecutorAddress = DEFAULT_EXECUTOR,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Describe the model that the executor has loaded."""
    with open_channel(executor, tls_ca) as channel:
        try:
            response = executor_pb2_grpc.ExecutorStub(channel).GetModelInfo(
                executor_pb2.GetModelInfoRequest(), timeout=timeout
            )
        except grpc.RpcError as error:
            raise unreachable(from_rpc_error(error), "executor", executor) from None
    facts: dict[str, object] = {
        "model": response.model,
        "model_version": response.model_version,
        "tokenizer_fingerprint": response.tokenizer_fingerprint,
        "vocab_size": response.vocab_size,
        "context_length": response.context_length,
        "eos_token_ids": list(response.eos_token_ids),
        "block_size": response.block_size,
        "kv_bytes_per_token": response.kv_bytes_per_token,
        "device": response.device,
        "dtype": response.dtype,
        "cpu_linear": response.cpu_linear,
    }
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(f"{name:{width}}  {value}", markup=False)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM leaves through the code that runs, which ends the converter and clears away what it wrote."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
