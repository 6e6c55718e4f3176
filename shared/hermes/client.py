"""A small client of the assembler: `Client`, and `AsyncClient` for asyncio.

    with Client() as hermes:
        print(hermes.chat("What is the capital of France?", temperature=0).text)
        with hermes.stream("Tell me more.") as answer:
            for piece in answer:
                print(piece, end="", flush=True)

Whatever fails raises HermesError with the reason that the server gave.
"""

import asyncio
from pathlib import Path
from typing import Final, Self, Unpack

import grpc

from hermes.answers import (
    Answer,
    Assembled,
    AssemblyInfo,
    Delta,
    FinishReason,
    Sample,
    Timings,
    TokenLogprob,
    Usage,
    Warning,  # noqa: A004 - the contract's name
    assembled,
)
from hermes.arguments import seconds
from hermes.channels import open_aio_channel, open_channel
from hermes.explanations import Explanation, Segment, explanation
from hermes.health import ASSEMBLER, GENERATE, ServiceHealth, probe_on, probe_on_aio
from hermes.messages import Message, Messages, ToolCall
from hermes.requests import (
    AssembleOptions,
    GenerateOptions,
    PromptOptions,
    assemble_request,
    explain_request,
    generate_request,
)
from hermes.streams import AnswerStream, AsyncAnswerStream, said
from hermes.v1 import assembler_pb2_grpc
from shared.errors import HermesError

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_EXECUTOR",
    "Answer",
    "AnswerStream",
    "AssembleOptions",
    "Assembled",
    "AssemblyInfo",
    "AsyncAnswerStream",
    "AsyncClient",
    "Client",
    "Delta",
    "Explanation",
    "FinishReason",
    "GenerateOptions",
    "HermesError",
    "Message",
    "Messages",
    "PromptOptions",
    "Sample",
    "Segment",
    "ServiceHealth",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "Warning",
]

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_EXECUTOR: Final = "127.0.0.1:50052"
"""Where an executor is, for what operators ask of it."""


class Client:
    """Talks to one assembler. Safe to share between threads."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, timeout: float | None = None, tls_ca: Path | None = None
    ) -> None:
        """Opens no connection yet.

        address: `host:port`, or any gRPC target.
        timeout: seconds for each whole call, where the call names none.
        tls_ca: file with the certificates to trust; without it the connection is not encrypted.
        """
        self.address = address
        self.timeout = seconds(timeout)
        self._channel = open_channel(address, tls_ca)
        self._stub = assembler_pb2_grpc.AssemblerStub(self._channel)

    def chat(self, messages: Messages | None = None, **options: Unpack[GenerateOptions]) -> Answer:
        """Answers messages (or `text=`, `token_ids=`) and returns the whole answer."""
        stream = self.stream(messages, **options)
        for _ in stream.deltas():
            pass
        return stream.answer

    def stream(self, messages: Messages | None = None, **options: Unpack[GenerateOptions]) -> AnswerStream:
        """As chat, and returns at once: iterate over what it returns for the text as it comes."""
        request = generate_request(messages, **options)
        return AnswerStream(self._stub.Generate(request, timeout=_timeout(options, self.timeout)), self.address)

    def assemble(self, messages: Messages | None = None, **options: Unpack[AssembleOptions]) -> Assembled:
        """The prompt as the model reads it: token ids and text."""
        request = assemble_request(messages, **options)
        try:
            return assembled(self._stub.Assemble(request, timeout=_timeout(options, self.timeout)))
        except grpc.RpcError as error:
            raise said(error, self.address) from None

    def explain(self, messages: Messages | None = None, **options: Unpack[PromptOptions]) -> Explanation:
        """The prompt piece by piece: whose text each is, its token ids, and what each cache has of it now."""
        request = explain_request(messages, **options)
        try:
            return explanation(self._stub.Explain(request, timeout=_timeout(options, self.timeout)))
        except grpc.RpcError as error:
            raise said(error, self.address) from None

    def health(self) -> tuple[ServiceHealth, ...]:
        """Whether the assembler works, and whether it can reach an executor. Raises nothing."""
        return tuple(probe_on(self._channel, service, self.address) for service in (ASSEMBLER, GENERATE))

    def close(self) -> None:
        """Ends the connection, and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit_info: object) -> None:
        self.close()


class AsyncClient:
    """As Client, for asyncio. Belongs to the event loop that it is made in."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, timeout: float | None = None, tls_ca: Path | None = None
    ) -> None:
        """Opens no connection yet; make it inside a running event loop. The arguments are Client's."""
        self.address = address
        self.timeout = seconds(timeout)
        self._channel = open_aio_channel(address, tls_ca)
        self._stub: assembler_pb2_grpc.AssemblerAsyncStub = assembler_pb2_grpc.AssemblerStub(self._channel)

    async def chat(self, messages: Messages | None = None, **options: Unpack[GenerateOptions]) -> Answer:
        """Answers messages (or `text=`, `token_ids=`) and returns the whole answer."""
        async with self.stream(messages, **options) as stream:
            async for _ in stream.deltas():
                pass
            return stream.answer

    def stream(self, messages: Messages | None = None, **options: Unpack[GenerateOptions]) -> AsyncAnswerStream:
        """As chat, and returns at once: iterate over what it returns for the text as it comes."""
        request = generate_request(messages, **options)
        return AsyncAnswerStream(self._stub.Generate(request, timeout=_timeout(options, self.timeout)), self.address)

    async def assemble(self, messages: Messages | None = None, **options: Unpack[AssembleOptions]) -> Assembled:
        """The prompt as the model reads it: token ids and text."""
        request = assemble_request(messages, **options)
        try:
            return assembled(await self._stub.Assemble(request, timeout=_timeout(options, self.timeout)))
        except grpc.RpcError as error:
            raise said(error, self.address) from None

    async def explain(self, messages: Messages | None = None, **options: Unpack[PromptOptions]) -> Explanation:
        """The prompt piece by piece: whose text each is, its token ids, and what each cache has of it now."""
        request = explain_request(messages, **options)
        try:
            return explanation(await self._stub.Explain(request, timeout=_timeout(options, self.timeout)))
        except grpc.RpcError as error:
            raise said(error, self.address) from None

    async def health(self) -> tuple[ServiceHealth, ...]:
        """Whether the assembler works, and whether it can reach an executor. Raises nothing."""
        services = (ASSEMBLER, GENERATE)
        return tuple(await asyncio.gather(*(probe_on_aio(self._channel, name, self.address) for name in services)))

    async def close(self) -> None:
        """Ends the connection, and every call on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exit_info: object) -> None:
        await self.close()


def _timeout(options: PromptOptions, otherwise: float | None) -> float | None:
    timeout = options.get("timeout")
    return seconds(otherwise if timeout is None else timeout)
