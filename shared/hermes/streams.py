"""An answer as it comes, for plain and for asyncio callers."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Protocol, Self

import grpc

from hermes.answers import Answer, AnswerBuilder, Delta
from hermes.channels import unreachable
from hermes.v1 import assembler_pb2
from shared.errors import HermesError, from_rpc_error


class _Events(Protocol):
    def __iter__(self) -> Iterator[assembler_pb2.AssemblerGenerateResponse]: ...
    def cancel(self) -> object: ...


class _AsyncEvents(Protocol):
    def __aiter__(self) -> AsyncIterator[assembler_pb2.AssemblerGenerateResponse]: ...
    def cancel(self) -> object: ...


class AnswerStream:
    """An answer as it comes. Iterating gives the first sample's text, piece by piece; `answer` is there at the end.

    An iteration that was left goes on where it stopped. Leaving the `with` block, `close`, and dropping the stream
    cancel the call on both services.
    """

    def __init__(self, events: _Events, address: str) -> None:
        self._call = events
        self._events = iter(events)
        self._address = address
        self._builder = AnswerBuilder()
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError before the end of the iteration."""
        return _ended(self._answer)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """The next piece of text. Raises HermesError for whatever fails."""
        for delta in self.deltas():
            if delta.index == 0 and delta.text:
                return delta.text
        raise StopIteration

    def deltas(self) -> Generator[Delta]:
        """Every sample's new text, reasoning and tokens. Raises HermesError for whatever fails."""
        if self._answer is not None:
            return
        try:
            for event in self._events:
                if delta := self._builder.add(event):
                    yield delta
        except grpc.RpcError as error:
            raise said(error, self._address) from None
        self._answer = self._builder.answer()

    def close(self) -> None:
        """Cancels the call; does nothing after its end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit_info: object) -> None:
        self.close()


class AsyncAnswerStream:
    """As AnswerStream, with `async for` and `async with`."""

    def __init__(self, events: _AsyncEvents, address: str) -> None:
        self._call = events
        self._events = aiter(events)
        self._address = address
        self._builder = AnswerBuilder()
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError before the end of the iteration."""
        return _ended(self._answer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """The next piece of text. Raises HermesError for whatever fails."""
        async for delta in self.deltas():
            if delta.index == 0 and delta.text:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Every sample's new text, reasoning and tokens. Raises HermesError for whatever fails."""
        if self._answer is not None:
            return
        try:
            async for event in self._events:
                if delta := self._builder.add(event):
                    yield delta
        except grpc.RpcError as error:
            raise said(error, self._address) from None
        self._answer = self._builder.answer()

    def close(self) -> None:
        """Cancels the call; does nothing after its end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exit_info: object) -> None:
        self.close()


def said(error: grpc.RpcError, address: str) -> HermesError:
    """A failed call on the assembler as its caller is told."""
    return unreachable(from_rpc_error(error), "assembler", address)


def _ended(answer: Answer | None) -> Answer:
    if answer is None:
        raise RuntimeError("the answer has not ended: iterate over the stream to its end first")
    return answer
