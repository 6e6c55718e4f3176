"""The servicer: prompts in from the wire, the engine's events out to it; nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import numpy as np

from executor.engine import Engine
from executor.mailbox import Mailbox, Outbox
from executor.replies import Response, responses
from executor.requests import Job
from executor.translate import Translator
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared.errors import deadline_exceeded, invalid_argument

Requests = AsyncIterator[executor_pb2.ExecutorGenerateRequest]
Context = grpc.aio.ServicerContext[Any, Any]


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
        job = self._engine.submit(request, lambda event: self._outbox.put(mailbox, event))
        stops = asyncio.create_task(self._read_stops(request_iterator, job))
        unfinished = request.sampling.samples
        try:
            while unfinished:
                for response in responses(await mailbox.take()):
                    unfinished -= response.HasField("finished")
                    yield response
                if stops.done():
                    stops.result()
        finally:
            self._engine.cancel(job)
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
            kv_blocks_total=load.blocks_total,
            kv_blocks_active=load.blocks_active,
            kv_blocks_cached=load.blocks_cached,
            kv_blocks_pinned=load.blocks_pinned,
        )

    async def MatchPrefix(
        self, request: executor_pb2.MatchPrefixRequest, context: Context
    ) -> executor_pb2.MatchPrefixResponse:
        """How far the tree would carry a prompt, without holding or counting anything."""
        self._translator.check_length(len(request.token_ids))
        scope, token_ids = self._translator.scope(request.namespace), _ids(request).tolist()
        cached = await asyncio.wrap_future(self._engine.call(lambda: self._engine.cache.match(scope, token_ids)))
        return executor_pb2.MatchPrefixResponse(cached_tokens=cached)

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
                length = len(parts[0])
                self._translator.check_length(length)
                while not part.end_of_prompt:
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
                    length += len(parts[-1])
                    self._translator.check_length(length)
        except TimeoutError:
            raise deadline_exceeded(
                "PROMPT_TIMEOUT",
                f"The prompt did not arrive within {self._prompt_timeout_seconds:g} s; send its parts without pause.",
            ) from None
        return _Prompt(start, np.concatenate(parts).tolist())

    async def _read_stops(self, requests: Requests, job: Job) -> None:
        """Reads what comes after the prompt: StopSample, or nothing."""
        async for message in requests:
            if message.WhichOneof("part") != "stop":
                raise invalid_argument(
                    "BAD_STREAM_ORDER", "After end_of_prompt, a Generate stream carries only `stop`."
                )
            if message.stop.index >= job.request.sampling.samples:
                raise invalid_argument("NO_SUCH_SAMPLE", f"There is no sample {message.stop.index} to stop.")
            self._engine.stop_sample(job, message.stop.index)


def _ids(
    part: executor_pb2.TokenChunk | executor_pb2.MatchPrefixRequest,
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(part.token_ids, dtype=np.uint32)
