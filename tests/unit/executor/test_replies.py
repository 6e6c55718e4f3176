"""The engine's events on the wire: joined by sample, in order, nothing lost."""

import pytest

from executor.events import Choice, Failed, Finished, FinishReason, Generated, Started, TokenLogprob, Usage
from executor.replies import responses
from hermes.v1 import types_pb2
from shared.errors import HermesError, internal


def finished(stop_token_id: int | None, usage: Usage | None = None) -> Finished:
    reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
    return Finished(1, reason, stop_token_id, usage, 0.25, 1.5, 2.0)


def test_tokens_that_piled_up_are_one_delta_a_sample() -> None:
    events = [Started(3, 2), Generated(0, Choice(7)), Generated(1, Choice(8)), Generated(0, Choice(9)), finished(None)]
    started, first, second, end = responses(events)
    assert (started.started.prompt_tokens, started.started.cached_tokens) == (3, 2)
    assert (first.delta.index, list(first.delta.token_ids)) == (0, [7, 9])
    assert (second.delta.index, list(second.delta.token_ids)) == (1, [8])
    assert end.finished.index == 1


def test_the_end_is_told_with_usage_and_timings() -> None:
    (response,) = responses([finished(0, Usage(10, 4, 8))])
    event = response.finished
    assert event.finish_reason == types_pb2.FINISH_REASON_STOP
    assert event.HasField("stop_token_id")
    assert event.usage == types_pb2.Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8)
    assert event.timings.queue.ToMilliseconds() == 250
    assert event.timings.prefill.ToMilliseconds() == 1500
    assert event.timings.decode.ToSeconds() == 2
    (response,) = responses([finished(None)])
    assert response.finished.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not response.finished.HasField("stop_token_id")
    assert not response.finished.HasField("usage")


def test_log_probabilities_stand_beside_their_tokens() -> None:
    choice = Choice(7, -0.5, (TokenLogprob(7, -0.5), TokenLogprob(3, -2.0)))
    (response,) = responses([Generated(0, choice)])
    (logprob,) = response.delta.logprobs
    assert (logprob.token_id, logprob.logprob) == (7, -0.5)
    assert [(top.token_id, top.logprob) for top in logprob.top] == [(7, -0.5), (3, -2.0)]


def test_an_error_comes_after_the_tokens_before_it() -> None:
    told = responses([Generated(0, Choice(7)), Failed(internal("BROKEN", "It broke."))])
    assert list(next(told).delta.token_ids) == [7]
    with pytest.raises(HermesError, match="It broke"):
        next(told)
