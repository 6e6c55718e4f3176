"""The engine's events as the contract's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from executor.events import Choice, Event, Failed, Finished, FinishReason, Generated, Started
from hermes.v1 import executor_pb2, types_pb2
from shared.durations import duration

Response = executor_pb2.ExecutorGenerateResponse

_REASONS: Final = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}


def responses(events: Iterable[Event]) -> Iterator[Response]:
    """The events as messages, the tokens of a sample joined in one delta. Raises the error of a request that failed."""
    deltas: dict[int, executor_pb2.TokenDelta] = {}
    for event in events:
        if isinstance(event, Generated):
            _add(deltas.setdefault(event.index, executor_pb2.TokenDelta(index=event.index)), event.choice)
            continue
        yield from _told(deltas)
        match event:
            case Started(prompt_tokens, cached_tokens):
                started = executor_pb2.ExecutionStarted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
                yield Response(started=started)
            case Finished():
                yield Response(finished=_finished(event))
            case Failed(error):
                raise error
    yield from _told(deltas)


def _told(deltas: dict[int, executor_pb2.TokenDelta]) -> Iterator[Response]:
    """What has gathered, by sample; it is empty afterwards."""
    yield from (Response(delta=delta) for delta in deltas.values())
    deltas.clear()


def _add(delta: executor_pb2.TokenDelta, choice: Choice) -> None:
    delta.token_ids.append(choice.token_id)
    if choice.logprob is not None:
        top = [types_pb2.TokenLogprob(token_id=each.token_id, logprob=each.logprob) for each in choice.top]
        delta.logprobs.add(token_id=choice.token_id, logprob=choice.logprob, top=top)


def _finished(event: Finished) -> executor_pb2.ExecutionFinished:
    usage = event.usage
    return executor_pb2.ExecutionFinished(
        index=event.index,
        finish_reason=_REASONS[event.reason],
        stop_token_id=event.stop_token_id,
        usage=None if usage is None else types_pb2.Usage(**usage._asdict()),
        timings=types_pb2.Timings(
            queue=duration(event.queue_seconds),
            prefill=duration(event.prefill_seconds),
            decode=duration(event.decode_seconds),
        ),
    )
