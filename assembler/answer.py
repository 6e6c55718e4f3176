"""One answer on its way: the executor's events in, the caller's events out."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeAlias

from assembler.answer_format import PLAIN, AnswerFormat
from assembler.detokenizer import StopRule
from assembler.sample import Sample
from assembler.splice import Given
from assembler.tokenizer import TokenIds, Tokenizer
from assembler.tools import ToolCall
from assembler.upstream import Run
from hermes.v1 import assembler_pb2, executor_pb2, types_pb2

Event: TypeAlias = assembler_pb2.AssemblerGenerateResponse


class Step(NamedTuple):
    """Events for the caller, and the sample that a stop string has just ended."""

    events: tuple[Event, ...]
    stopped: int | None = None


class Answer:
    """Translates the answer to one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: TokenIds,
        rule: StopRule,
        head: assembler_pb2.AnswerStarted,
        form: AnswerFormat = PLAIN,
        *,
        at_end: Callable[[Given], Awaitable[None]] | None = None,
    ) -> None:
        """head: what the caller is told first, but for the executor's token counts. form: how the answer is read.

        at_end: takes each sample before its caller is told that it has ended.
        """
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._rule = rule
        self._head = head
        self._form = form
        self._at_end = at_end
        self._samples: dict[int, Sample] = {}

    async def events(self, run: Run) -> AsyncIterator[Event]:
        """The caller's events, as the run goes on; ends samples whose stop string has come."""
        async for event in run.events():
            step = self.take(event)
            if step.stopped is not None:
                await run.stop_sample(step.stopped)
            for each in step.events:
                if self._at_end is not None and each.HasField("finished"):
                    await self._at_end(self._sample(each.finished.index).given)
                yield each

    def take(self, event: executor_pb2.ExecutorGenerateResponse) -> Step:
        """What one event of the executor's means for the caller."""
        match event.WhichOneof("event"):
            case "started":
                return Step((self._started(event.started),))
            case "delta":
                return self._delta(event.delta)
            case "finished":
                return Step(tuple(self._finished(event.finished)))
            case _:  # an event of a later contract
                return Step(())

    def _sample(self, index: int) -> Sample:
        if index not in self._samples:
            self._samples[index] = Sample(self._tokenizer, self._prompt, self._rule, self._form)
        return self._samples[index]

    def _started(self, started: executor_pb2.ExecutionStarted) -> Event:
        event = Event(started=self._head)
        event.started.prompt_tokens = started.prompt_tokens
        event.started.cached_tokens = started.cached_tokens
        return event

    def _delta(self, delta: executor_pb2.TokenDelta) -> Step:
        sample = self._sample(delta.index)
        if sample.stop is not None:
            return Step(())
        piece = sample.push(delta.token_ids)
        event = Event(
            delta=assembler_pb2.AnswerDelta(
                index=delta.index,
                text=piece.text,
                reasoning=piece.reasoning,
                token_ids=delta.token_ids[: piece.tokens],
                logprobs=[self._with_bytes(each) for each in delta.logprobs[: piece.tokens]],
            )
        )
        return Step((event,), None if piece.stop is None else delta.index)

    def _finished(self, finished: executor_pb2.ExecutionFinished) -> list[Event]:
        sample = self._sample(finished.index)
        rest = sample.finish()
        event = Event(finished=assembler_pb2.AnswerFinished(index=finished.index, finish_reason=finished.finish_reason))
        if sample.stop is not None:
            event.finished.finish_reason = types_pb2.FINISH_REASON_STOP
            event.finished.stop = sample.stop
        elif finished.HasField("stop_token_id"):
            event.finished.stop_token_id = finished.stop_token_id
        if sample.calls and event.finished.finish_reason == types_pb2.FINISH_REASON_STOP:
            event.finished.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
        event.finished.tool_calls.extend(map(_as_told, sample.calls))
        if finished.HasField("usage"):
            event.finished.usage.CopyFrom(finished.usage)
            # Tokens that the executor made before it heard of a stop string are not in the answer.
            event.finished.usage.completion_tokens = sum(each.tokens for each in self._samples.values())
        if finished.HasField("timings"):
            event.finished.timings.CopyFrom(finished.timings)
            event.finished.timings.assemble.CopyFrom(self._head.info.timings.assemble)
        if not rest.text and not rest.reasoning:
            return [event]
        delta = assembler_pb2.AnswerDelta(index=finished.index, text=rest.text, reasoning=rest.reasoning)
        return [Event(delta=delta), event]

    def _with_bytes(self, logprob: types_pb2.TokenLogprob) -> types_pb2.TokenLogprob:
        bytes_of = self._tokenizer.vocabulary.bytes_of
        logprob.token = bytes_of(logprob.token_id)
        for top in logprob.top:
            top.token = bytes_of(top.token_id)
        return logprob


def _as_told(call: ToolCall) -> types_pb2.ToolCall:
    return types_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.text)


async def joined(events: AsyncIterator[Event]) -> AsyncGenerator[Event]:
    """The same events at the pace of the one who takes them; deltas of a sample that pile up become one.

    So a slow caller holds neither the executor nor more than one delta a sample. Closing it closes the source's reader.
    """
    waiting: deque[Event] = deque()
    deltas: dict[int, assembler_pb2.AnswerDelta] = {}  # those in waiting, by sample
    news = asyncio.Event()
    ended = False

    async def collect() -> None:
        nonlocal ended
        try:
            async for event in events:
                if event.HasField("delta") and event.delta.index in deltas:
                    _join(deltas[event.delta.index], event.delta)
                else:
                    waiting.append(event)
                    if event.HasField("delta"):
                        deltas[event.delta.index] = event.delta
                news.set()
        finally:
            ended = True
            news.set()

    collector = asyncio.create_task(collect(), name="answer")
    try:
        while waiting or not ended:
            await news.wait()
            while waiting:
                event = waiting.popleft()
                if event.HasField("delta"):
                    del deltas[event.delta.index]
                yield event
            if not ended:
                news.clear()
        await collector  # raises what ended it
    finally:
        collector.cancel()
        await asyncio.gather(collector, return_exceptions=True)


def _join(earlier: assembler_pb2.AnswerDelta, later: assembler_pb2.AnswerDelta) -> None:
    earlier.text += later.text
    earlier.reasoning += later.reasoning
    earlier.token_ids.extend(later.token_ids)
    earlier.logprobs.extend(later.logprobs)
