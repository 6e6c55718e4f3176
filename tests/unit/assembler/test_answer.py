import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable

import pytest

from assembler.answer import Answer, Event, joined
from assembler.answer_format import PLAIN as TEXT
from assembler.answer_format import AnswerFormat
from assembler.call_formats import FORMATS
from assembler.detokenizer import StopRule
from assembler.model_files import ModelFiles
from assembler.reasoning import ReasoningMarks
from assembler.splice import Given
from hermes.v1 import assembler_pb2, executor_pb2, types_pb2

PLAIN = StopRule()
STOP, LENGTH, CALLS = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_TOOL_CALLS
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
# This model's tokenizer has no marks of its own, so they are read as text.
MARKED = AnswerFormat(reasoning=ReasoningMarks("<think>", "</think>"), calls=FORMATS["hermes"])


def delta(ids: Iterable[int], index: int = 0, **fields: object) -> executor_pb2.ExecutorGenerateResponse:
    return executor_pb2.ExecutorGenerateResponse(
        delta=executor_pb2.TokenDelta(index=index, token_ids=list(ids), **fields)
    )


def finished(index: int = 0, **fields: object) -> executor_pb2.ExecutorGenerateResponse:
    return executor_pb2.ExecutorGenerateResponse(finished=executor_pb2.ExecutionFinished(index=index, **fields))


def answer(files: ModelFiles, rule: StopRule = PLAIN, form: AnswerFormat = TEXT) -> Answer:
    info = assembler_pb2.AssemblyInfo(tokenizer_fingerprint="f")
    info.timings.assemble.FromMilliseconds(5)
    head = assembler_pb2.AnswerStarted(request_id="r", model="m", info=info)
    return Answer(files.tokenizer, files.tokenizer.encode("q"), rule, head, form)


def told(ours: Answer, files: ModelFiles, text: str, **end: object) -> list[Event]:
    """The events of a sample whose tokens come one by one."""
    events = [event for token in files.tokenizer.encode(text) for event in ours.take(delta([token])).events]
    return [*events, *ours.take(finished(**end)).events]


def test_the_start_tells_what_both_services_know(files: ModelFiles) -> None:
    started = executor_pb2.ExecutionStarted(prompt_tokens=9, cached_tokens=4)
    (event,) = answer(files).take(executor_pb2.ExecutorGenerateResponse(started=started)).events
    assert (event.started.request_id, event.started.prompt_tokens, event.started.cached_tokens) == ("r", 9, 4)
    assert event.started.info.tokenizer_fingerprint == "f"


def test_a_stop_string_ends_its_sample_alone_and_cuts_ids_log_probabilities_and_usage(files: ModelFiles) -> None:
    ours = answer(files, StopRule(stops=(" two",)))
    ids = files.tokenizer.encode("one two three")
    logprobs = [types_pb2.TokenLogprob(token_id=each, logprob=-1) for each in ids]
    assert ours.take(delta(files.tokenizer.encode("one"), index=1)).stopped is None
    step = ours.take(delta(ids, logprobs=logprobs))
    (event,) = step.events
    assert step.stopped == 0
    assert (event.delta.text, list(event.delta.token_ids)) == ("one", list(ids[:2]))
    assert [each.token for each in event.delta.logprobs] == [b"one", b" two"]
    assert ours.take(delta(ids)).events == ()
    (event,) = ours.take(finished(finish_reason=LENGTH)).events
    assert (event.finished.finish_reason, event.finished.stop) == (STOP, " two")
    usage = types_pb2.Usage(prompt_tokens=1, completion_tokens=7)
    (event,) = ours.take(finished(index=1, finish_reason=LENGTH, usage=usage)).events
    assert event.finished.WhichOneof("matched_stop") is None
    assert (event.finished.finish_reason, event.finished.usage.completion_tokens) == (LENGTH, 3)


def test_the_closing_token_is_delivered_without_text_and_held_text_comes_before_the_end(files: ModelFiles) -> None:
    ours = answer(files, StopRule(stops=("onerous",), hidden=frozenset()))
    end = files.tokenizer.encode("<|im_end|>")
    (event,) = ours.take(delta(files.tokenizer.encode("one") + end)).events
    assert (event.delta.text, list(event.delta.token_ids)[-1]) == ("", end[0])
    timings = types_pb2.Timings()
    timings.decode.FromMilliseconds(7)
    rest, last = ours.take(finished(finish_reason=STOP, stop_token_id=end[0], timings=timings)).events
    assert (rest.delta.text, list(rest.delta.token_ids)) == ("one", [])
    assert last.finished.stop_token_id == end[0]
    assert last.finished.timings.assemble.ToMilliseconds() == 5
    assert last.finished.timings.decode.ToMilliseconds() == 7


def test_token_bytes_are_filled_in_for_the_likeliest_tokens_too(files: ModelFiles) -> None:
    (one,) = files.tokenizer.encode("é")
    logprob = types_pb2.TokenLogprob(token_id=one, top=[types_pb2.TokenLogprob(token_id=one)])
    (event,) = answer(files).take(delta(array("I", [one]), logprobs=[logprob])).events
    assert (event.delta.logprobs[0].token, event.delta.logprobs[0].top[0].token) == (b"\xc3\xa9", b"\xc3\xa9")


def test_of_four_samples_one_is_stopped_and_three_go_on(files: ModelFiles) -> None:
    ours = answer(files, StopRule(stops=("END",)))
    texts = ["one", "two END", "three", "four"]
    stopped = [ours.take(delta(files.tokenizer.encode(text), index=index)).stopped for index, text in enumerate(texts)]
    assert stopped == [None, 1, None, None]
    more = files.tokenizer.encode(" more")
    events = [event for index in range(4) for event in ours.take(delta(more, index=index)).events]
    assert [(event.delta.index, event.delta.text) for event in events] == [(0, " more"), (2, " more"), (3, " more")]
    ends = [ours.take(finished(index, finish_reason=LENGTH)).events[-1].finished for index in range(4)]
    assert [end.finish_reason for end in ends] == [LENGTH, STOP, LENGTH, LENGTH]


def test_calls_are_told_at_the_end_and_every_id_in_a_delta(files: ModelFiles) -> None:
    text = f"<think>hm</think>So {CALL} it"
    *deltas, last = told(answer(files, form=MARKED), files, text, finish_reason=STOP)
    assert "".join(event.delta.reasoning for event in deltas) == "hm"
    assert "".join(event.delta.text for event in deltas) == "So  it"
    assert [token for event in deltas for token in event.delta.token_ids] == list(files.tokenizer.encode(text))
    (call,) = last.finished.tool_calls
    assert (call.name, call.arguments_json, len(call.id)) == ("f", '{"a": 1}', 9)
    assert last.finished.finish_reason == CALLS


def test_an_answer_that_was_cut_off_keeps_its_reason_and_its_whole_calls(files: ModelFiles) -> None:
    *deltas, last = told(answer(files, form=MARKED), files, CALL + CALL[:-20], finish_reason=LENGTH)
    assert (last.finished.finish_reason, len(last.finished.tool_calls)) == (LENGTH, 1)
    assert "".join(event.delta.text for event in deltas) == CALL[:-20]


def test_a_stop_string_behind_a_call_is_told_beside_it(files: ModelFiles) -> None:
    last = told(answer(files, StopRule(stops=("END",)), MARKED), files, f"{CALL} END", finish_reason=STOP)[-1]
    assert (last.finished.finish_reason, last.finished.stop, len(last.finished.tool_calls)) == (CALLS, "END", 1)


def test_a_stop_string_that_the_end_shows_ends_the_sample(files: ModelFiles) -> None:
    text = '<tool_call>{"name END'
    *deltas, last = told(answer(files, StopRule(stops=("END",)), MARKED), files, text, finish_reason=LENGTH)
    assert (last.finished.finish_reason, last.finished.stop) == (STOP, "END")
    assert "".join(event.delta.text for event in deltas) == '<tool_call>{"name '


def test_calls_of_samples_are_kept_apart_and_log_probabilities_go_with_their_ids(files: ModelFiles) -> None:
    ours = answer(files, form=MARKED)
    ids, other = files.tokenizer.encode(CALL), files.tokenizer.encode("<think>b")
    events: list[Event] = []
    for place in range(max(len(ids), len(other))):
        for index, each in enumerate((ids, other)):
            for token in each[place : place + 1]:
                logprob = types_pb2.TokenLogprob(token_id=token)
                events += ours.take(delta([token], index=index, logprobs=[logprob])).events
    assert all([each.token_id for each in event.delta.logprobs] == list(event.delta.token_ids) for event in events)
    ends = [ours.take(finished(index, finish_reason=STOP)).events[-1].finished for index in (0, 1)]
    assert [(end.finish_reason, len(end.tool_calls)) for end in ends] == [(CALLS, 1), (STOP, 0)]
    assert "".join(event.delta.reasoning for event in events if event.delta.index) == "b"


def text_delta(text: str, index: int = 0) -> Event:
    return Event(delta=assembler_pb2.AnswerDelta(index=index, text=text, reasoning=f"{text}?", token_ids=[len(text)]))


async def test_deltas_that_pile_up_become_one_a_sample() -> None:
    piled_up = asyncio.Event()

    async def source() -> AsyncIterator[Event]:
        yield Event(started=assembler_pb2.AnswerStarted())
        for text in ("a", "bb", "ccc"):
            yield text_delta(text)
            yield text_delta(text.upper(), index=1)
        yield Event(finished=assembler_pb2.AnswerFinished())
        piled_up.set()
        yield text_delta("D", index=1)

    events = joined(source())
    first = await anext(events)
    await piled_up.wait()
    rest = [event async for event in events]
    assert first.HasField("started")
    assert "".join(event.delta.text for event in rest if event.delta.index == 0) == "abbccc"
    assert "".join(event.delta.text for event in rest if event.delta.index == 1) == "ABBCCCD"
    assert "".join(event.delta.reasoning for event in rest if event.delta.index == 1) == "A?BB?CCC?D?"
    assert next(list(event.delta.token_ids) for event in rest if event.HasField("delta")) == [1, 2, 3]
    assert len(rest) <= 4


async def test_what_ends_the_source_ends_the_joined_events_after_all_that_came_before() -> None:
    async def source() -> AsyncIterator[Event]:
        yield text_delta("a")
        raise ValueError("gone")

    events = joined(source())
    assert (await anext(events)).delta.text == "a"
    with pytest.raises(ValueError, match="gone"):
        await anext(events)


async def test_leaving_early_closes_the_source() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncIterator[Event]:
        try:
            yield text_delta("a")
            await asyncio.Event().wait()
        finally:
            closed.set()

    events = joined(source())
    await anext(events)
    await events.aclose()
    assert closed.is_set()


async def test_each_sample_is_taken_whole_before_its_caller_is_told_of_its_end(files: ModelFiles) -> None:
    """So that whoever is told can go on at once, and finds it remembered."""

    class Played:
        """A run of two samples, the first of which a stop string ends."""

        def __init__(self) -> None:
            self.stopped: list[int] = []

        async def events(self) -> AsyncIterator[executor_pb2.ExecutorGenerateResponse]:
            yield delta(files.tokenizer.encode("one two three"))
            yield delta(files.tokenizer.encode("all of it <"), index=1)
            for index in range(2):
                yield finished(index, finish_reason=LENGTH)

        async def stop_sample(self, index: int) -> None:
            self.stopped.append(index)

    order: list[str] = []

    async def take(given: Given) -> None:
        order.append(f"{given.text} {given.stopped} {len(given.ids)}")
        await asyncio.sleep(0)

    head = assembler_pb2.AnswerStarted(request_id="r", model="m")
    prompt = files.tokenizer.encode("q")
    ours = Answer(files.tokenizer, prompt, StopRule(stops=(" two", "<|")), head, at_end=take)
    run = Played()
    async for event in ours.events(run):  # type: ignore[arg-type]
        kind = event.WhichOneof("event")
        order.append(f"told {event.delta.text}" if kind == "delta" else f"{kind} {event.finished.index}")
    ids = len(files.tokenizer.encode("all of it <"))
    assert order == [
        "told one", "told all of it ", "one True 2", "finished 0", "told <", f"all of it < False {ids}", "finished 1",
    ]  # fmt: skip
    assert run.stopped == [0]
