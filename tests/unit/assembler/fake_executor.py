"""An executor that says what a test wrote down for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from hermes.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from shared.errors import HermesError

Event = executor_pb2.ExecutorGenerateResponse
Script = Callable[["FakeExecutor"], AsyncIterator[Event]]


def started(prompt_tokens: int = 0) -> Event:
    return Event(started=executor_pb2.ExecutionStarted(prompt_tokens=prompt_tokens, cached_tokens=0))


def delta(*token_ids: int, index: int = 0) -> Event:
    return Event(delta=executor_pb2.TokenDelta(index=index, token_ids=token_ids))


def finished(index: int = 0, usage: types_pb2.Usage | None = None, **fields: Any) -> Event:
    fields.setdefault("finish_reason", types_pb2.FINISH_REASON_STOP)
    return Event(finished=executor_pb2.ExecutionFinished(index=index, usage=usage, **fields))


class FakeExecutor(executor_pb2_grpc.ExecutorServicer):
    """Answers every prompt by its script, and keeps what it was sent.

    heard: everything after the prompt. ended: set when a job's call is over. held: what its tree has of each prompt,
    where it has one, told after match_seconds. asked: what it was asked of that.
    """

    def __init__(self, fingerprint: str) -> None:
        self.model = executor_pb2.GetModelInfoResponse(
            model="fake", device="cpu", tokenizer_fingerprint=fingerprint, context_length=8192, eos_token_ids=[2]
        )
        self.script: Script = _nothing
        self.parts: list[executor_pb2.ExecutorGenerateRequest] = []
        self.heard: asyncio.Queue[executor_pb2.ExecutorGenerateRequest] = asyncio.Queue()
        self.seconds: float | None = None
        self.ended = asyncio.Event()
        self.error: HermesError | None = None
        self.held: int | None = None
        self.match_seconds = 0.0
        self.asked: list[executor_pb2.MatchPrefixRequest] = []
        self.address = "127.0.0.1:0"
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serves, at the same address as before where there was one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        executor_pb2_grpc.add_ExecutorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every connection."""
        if self._server is not None:
            await self._server.stop(grace=None)

    async def GetModelInfo(self, request: Any, context: Any) -> executor_pb2.GetModelInfoResponse:  # noqa: N802
        return self.model

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Event]:  # noqa: N802
        self.seconds = context.time_remaining()
        context.add_done_callback(lambda _: self.ended.set())
        if self.error is not None:
            status = rpc_status.to_status(self.error.status())
            await context.abort(status.code, status.details, status.trailing_metadata)
        self.parts = []
        async for part in request_iterator:
            self.parts.append(part)
            if (part.start.tokens if part.HasField("start") else part.tokens).end_of_prompt:
                break

        async def listen() -> None:
            async for message in request_iterator:
                await self.heard.put(message)

        listener = asyncio.create_task(listen())
        try:
            async for event in self.script(self):
                yield event
        finally:
            listener.cancel()

    async def MatchPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        if self.held is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a fake has no tree")
        await asyncio.sleep(self.match_seconds)
        return executor_pb2.MatchPrefixResponse(cached_tokens=self.held)

    async def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a fake has no load")


async def _nothing(executor: FakeExecutor) -> AsyncIterator[Event]:
    yield started()
    yield finished(usage=types_pb2.Usage())
