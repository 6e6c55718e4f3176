"""The servicer: prompts in from the wire, the engine's events out to it; nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np

from executor.engine import Engine
from executor.requests import Event, Failed, Finished, Generated, Sequence, Started
from executor.translate import Translator, finished_event
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared.errors import HermesError, deadline_exceeded, invalid_argument, unimplemented

Requests = AsyncIterator[executor_pb2.ExecutorGenerateRequest]
Response = executor_pb2.ExecutorGenerateResponse
Context = grpc.aio.ServicerContext[Any, Any]


class Mailbox:
    """The events of one request on their way from the engine to its handler; a slow reader finds them joined."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Called on the event loop."""
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All that has come since the last time, at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


class Outbox:
    """Carries the events of all requests to the event loop, one wake-up a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._step: list[tuple[Mailbox, Event]] = []

    def put(self, mailbox: Mailbox, event: Event) -> None:
        """Called on the engine's thread."""
        self._step.append((mailbox, event))

    def flush(self) -> None:
        """Called on the engine's thread at the end of a step."""
        if self._step:
            step, self._step = self._step, []
            self._loop.call_soon_threadsafe(_deliver, step)


def _deliver(step: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in step:
        mailbox.put(event)


class _Prompt(NamedTuple):
    start: executor_pb2.ExecutorStart
    token_ids: list[int]


class ExecutorService(executor_pb2_grpc.ExecutorServicer):
    """hermes.v1.Executor over one engine."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        translator: Translator,
        info: executor_pb2.GetModelInfoResponse,
        *,
        prompt_timeout_seconds: float,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._translator = translator
        self._info = info
        self._prompt_timeout_seconds = prompt_timeout_seconds

    async def Generate(self, request_iterator: Requests, context: Context) -> AsyncIterator[Response]:
        """Answers one prompt; see the contract."""
        prompt = await self._read_prompt(request_iterator)
        request = self._translator.request(prompt.start, prompt.token_ids)
        mailbox = Mailbox()
        sequence = self._engine.submit(request, lambda event: self._outbox.put(mailbox, event))
        stops = asyncio.create_task(self._read_stops(request_iterator, sequence))
        try:
            finished = False
            while not finished:
                for response in _responses(await mailbox.take()):
                    finished = response.WhichOneof("event") == "finished"
                    yield response
                if stops.done():
                    stops.result()
        finally:
            self._engine.cancel(sequence)
            if not stops.cancel() and not stops.cancelled():
                stops.exception()  # looked at, so that asyncio does not report it as lost

    async def GetModelInfo(
        self, request: executor_pb2.GetModelInfoRequest, context: Context
    ) -> executor_pb2.GetModelInfoResponse:
        """Describes the loaded model."""
        return self._info

    async def GetLoad(self, request: executor_pb2.GetLoadRequest, context: Context) -> executor_pb2.GetLoadResponse:
        """Occupancy after the engine's last step."""
        load = self._engine.load
        return executor_pb2.GetLoadResponse(
            running_requests=load.running,
            waiting_requests=load.waiting,
            kv_blocks_total=load.blocks_free + load.blocks_active + load.blocks_cached,
            kv_blocks_active=load.blocks_active,
            kv_blocks_cached=load.blocks_cached,
        )

    async def MatchPrefix(
        self, request: executor_pb2.MatchPrefixRequest, context: Context
    ) -> executor_pb2.MatchPrefixResponse:
        """Not served yet."""
        raise _not_yet("MatchPrefix")

    async def _read_prompt(self, requests: Requests) -> _Prompt:
        """Reads `start` and `tokens` up to end_of_prompt. Raises HermesError for a stream that is out of order."""
        try:
            async with asyncio.timeout(self._prompt_timeout_seconds):
                first = await anext(requests, None)
                if first is None or first.WhichOneof("part") != "start":
                    raise invalid_argument(
                        "BAD_STREAM_ORDER", "The first message of a Generate stream must be `start`."
                    )
                start, part = first.start, first.start.tokens
                self._translator.check_tokenizer(start)
                parts = [_ids(part)]
                while not part.end_of_prompt:
                    self._translator.check_length(sum(map(len, parts)))
                    message = await anext(requests, None)
                    if message is None:
                        raise invalid_argument(
                            "PROMPT_NOT_ENDED",
                            "The stream was closed before a part said end_of_prompt, so the prompt may be incomplete.",
                        )
                    if message.WhichOneof("part") != "tokens":
                        raise invalid_argument(
                            "BAD_STREAM_ORDER", "Until end_of_prompt, a Generate stream carries `tokens` after `start`."
                        )
                    part = message.tokens
                    parts.append(_ids(part))
        except TimeoutError:
            raise deadline_exceeded(
                "PROMPT_TIMEOUT",
                f"The prompt did not arrive within {self._prompt_timeout_seconds:g} s; send its parts without pause.",
            ) from None
        return _Prompt(start, np.concatenate(parts).tolist())

    async def _read_stops(self, requests: Requests, sequence: Sequence) -> None:
        """Reads what comes after the prompt: StopSample, or nothing."""
        async for message in requests:
            if message.WhichOneof("part") != "stop":
                raise invalid_argument(
                    "BAD_STREAM_ORDER", "After end_of_prompt, a Generate stream carries only `stop`."
                )
            if message.stop.index != 0:
                raise invalid_argument("BAD_STREAM_ORDER", f"There is no sample {message.stop.index} to stop.")
            self._engine.stop_sample(sequence)


class ExecutorAdminService(executor_pb2_grpc.ExecutorAdminServicer):
    """hermes.v1.ExecutorAdmin: not served yet."""

    async def WarmPrefix(
        self, request: executor_pb2.WarmPrefixRequest, context: Context
    ) -> executor_pb2.WarmPrefixResponse:
        raise _not_yet("WarmPrefix")

    async def UnpinPrefix(
        self, request: executor_pb2.UnpinPrefixRequest, context: Context
    ) -> executor_pb2.UnpinPrefixResponse:
        raise _not_yet("UnpinPrefix")

    async def DescribeTree(
        self, request: executor_pb2.DescribeTreeRequest, context: Context
    ) -> executor_pb2.DescribeTreeResponse:
        raise _not_yet("DescribeTree")

    async def FlushTree(
        self, request: executor_pb2.FlushTreeRequest, context: Context
    ) -> executor_pb2.FlushTreeResponse:
        raise _not_yet("FlushTree")


def _not_yet(method: str) -> HermesError:
    return unimplemented("NOT_SUPPORTED_YET", f"This executor does not serve {method} yet.", method=method)


def _ids(part: executor_pb2.TokenChunk) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(part.token_ids, dtype=np.uint32)


def _responses(events: list[Event]) -> Iterator[Response]:
    """The events as messages, neighbouring tokens joined in one delta. Raises the error of a request that failed."""
    token_ids: list[int] = []
    for event in events:
        if isinstance(event, Generated):
            token_ids.append(event.token_id)
            continue
        if token_ids:
            yield Response(delta=executor_pb2.TokenDelta(token_ids=token_ids))
            token_ids = []
        match event:
            case Started(prompt_tokens, cached_tokens):
                started = executor_pb2.ExecutionStarted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
                yield Response(started=started)
            case Finished():
                yield finished_event(event)
            case Failed(error):
                raise error
    if token_ids:
        yield Response(delta=executor_pb2.TokenDelta(token_ids=token_ids))
