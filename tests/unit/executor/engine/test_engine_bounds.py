"""The engine under pressure: a small pool, callers who leave, steps that fail. Everyone is told, nothing leaks."""

import random
import threading

import grpc
import pytest

from executor.events import Failed, Finished, FinishReason, Started
from executor.kv.eviction import KVLimits
from shared.errors import HermesError


def test_random_conversations_in_a_pool_of_2000_tokens(bench, words, monkeypatch):
    served, rng = bench(tokens=2000, batch_tokens=64, running=12, waiting=64), random.Random(5)
    forward = served.engine._model.forward

    def unreliable(batch, *pool):
        logits = forward(batch, *pool)
        if rng.random() < (0.02 if len(batch.last_rows) > 1 else 0.3):
            raise RuntimeError("injected")
        return logits

    monkeypatch.setattr(served.engine._model, "forward", unreliable)
    histories, answers, cancelled = [words(rng.randrange(1, 200), seed=seed) for seed in range(8)], [], set()
    for number in range(200):
        history = rng.choice(histories)
        prompt = history[: rng.randrange(1, len(history) + 1)] + words(rng.randrange(1, 60), seed=1000 + number)
        answer = served.submit(
            prompt[:1900],
            tokens=rng.randrange(1, 50),
            namespace=rng.choice("ab"),
            read=rng.random() < 0.9,
            write=rng.random() < 0.9,
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
        )
        answers.append(answer)
        for _ in range(rng.randrange(4)):
            served.step()
        if rng.random() < 0.2:
            victim = rng.choice(answers)
            served.engine.cancel(victim.job)
            cancelled.add(id(victim))
        if rng.random() < 0.1:
            served.engine.stop_sample(rng.choice(answers).job, 0)
        if isinstance(answer.end, Finished):
            histories.append(prompt + answer.ids)
    served.finish()
    for answer in answers:
        assert answer.end is not None or id(answer) in cancelled
        assert sum(isinstance(event, Finished | Failed) for event in answer.events) <= 1
    assert any(isinstance(answer.end, Failed) for answer in answers)
    assert sum(isinstance(answer.end, Finished) for answer in answers) > 100


def test_a_prompt_that_can_never_fit_is_refused_at_submit(bench, words):
    with pytest.raises(HermesError) as refusal:
        bench(tokens=160).submit(words(161))
    assert (refusal.value.code, refusal.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")


def test_a_prompt_that_fills_the_pool_gets_the_one_token_that_needs_no_room(bench, reference, words):
    prompt = words(160)
    (answer,) = bench(tokens=160).run(prompt, tokens=None)
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.ids == reference(prompt, 1)


def test_one_alone_in_a_full_pool_ends_with_length(bench, reference, words):
    prompt = words(100)
    (answer,) = bench(tokens=160).run(prompt, tokens=None)
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.ids == reference(prompt, 61)  # 160 slots hold 60 of the answer's tokens; the last one needs none


def test_an_answer_that_outgrew_the_pool_while_preempted_ends_with_length(bench, words):
    served = bench(tokens=64, block_size=4)
    answers = served.run(words(30, seed=1), words(30, seed=2), tokens=None)
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in answers)


def test_a_full_queue_is_told_when_to_come_back(bench, words):
    served = bench(running=1, waiting=2)
    answers = [served.submit(words(5, seed=seed)) for seed in range(5)]
    served.step()
    refused = [answer.end.error for answer in answers if isinstance(answer.end, Failed)]
    assert [(error.code, error.reason) for error in refused] == [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    ] * len(refused)
    assert len(refused) == 2, "one may run, and two may wait"
    assert all(error.retry_after for error in refused)
    served.finish()
    assert sum(isinstance(answer.end, Finished) for answer in answers) == 3


def test_a_failed_step_ends_its_own_requests_publishes_nothing_and_harms_no_later_one(
    bench, reference, words, monkeypatch
):
    served, prompt = bench(), words(100)
    forward = served.engine._model.forward
    monkeypatch.setattr(served.engine._model, "forward", lambda *_: 1 / 0)
    (broken,) = served.run(prompt)
    assert isinstance(broken.end, Failed)
    assert broken.end.error.code is grpc.StatusCode.INTERNAL
    assert served.cache.stats.nodes == 0
    monkeypatch.setattr(served.engine._model, "forward", forward)
    (answer,) = served.run(prompt)
    assert (answer.cached, answer.ids) == (0, reference(prompt))


def test_logits_that_are_no_numbers_fail_their_own_request_and_are_not_kept(bench, reference, words, monkeypatch):
    served, prompts = bench(), [words(100, seed=seed) for seed in range(3)]
    forward = served.engine._model.forward

    def broken(*arguments):
        logits = forward(*arguments).clone()
        logits[1] = float("nan")
        return logits

    monkeypatch.setattr(served.engine._model, "forward", broken)
    answers = [served.submit(prompt) for prompt in prompts]
    served.step()
    monkeypatch.setattr(served.engine._model, "forward", forward)
    served.finish()
    assert answers[1].end.error.reason == "NOT_A_NUMBER"
    assert [answers[i].ids for i in (0, 2)] == [reference(prompts[i]) for i in (0, 2)]
    (again,) = served.run(prompts[1])
    assert (again.cached, again.ids) == (0, reference(prompts[1]))


@pytest.mark.parametrize("steps", range(8))
def test_cancelled_at_any_step_a_request_is_told_nothing_more_and_keeps_what_it_computed(bench, words, steps):
    served, prompt = bench(batch_tokens=32), words(101)
    answer = served.submit(prompt)
    for _ in range(steps):
        served.step()
    served.engine.cancel(answer.job)
    served.engine.cancel(answer.job)
    told = len(answer.events)
    served.finish()
    assert len(answer.events) == told
    assert answer.end is None
    (again,) = served.run(prompt)
    assert again.cached == min(steps * 32, 100)


def test_a_stop_token_ends_the_answer_and_is_its_last_token(bench, reference, words):
    prompt = words(50)
    ids = reference(prompt)
    stop = ids[4]
    (answer,) = bench().run(prompt, stops=[stop])
    end = ids.index(stop) + 1
    assert answer.ids == ids[:end]
    assert (answer.finished.reason, answer.finished.stop_token_id) == (FinishReason.STOP, stop)


def test_no_stop_token_comes_before_min_tokens(bench, reference, words):
    prompt = words(50)
    stop = reference(prompt)[0]
    (answer,) = bench().run(prompt, stops=[stop], min_tokens=5, tokens=30)
    assert stop not in answer.ids[:5]


def test_an_answer_ends_with_the_context(bench, words, model, monkeypatch):
    monkeypatch.setattr(model, "context_length", 64)
    (answer,) = bench().run(words(60), tokens=None)
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.finished.usage.completion_tokens == 4


def test_stop_sample_ends_an_answer_as_a_stop_token_would(bench, words):
    served = bench()
    answer = served.submit(words(20), tokens=100)
    for _ in range(5):
        served.step()
    served.engine.stop_sample(answer.job, 0)
    served.engine.stop_sample(answer.job, 0)
    served.finish()
    assert (answer.finished.reason, answer.finished.stop_token_id) == (FinishReason.STOP, None)
    assert answer.finished.usage.completion_tokens == len(answer.ids) == 5


def test_every_running_answer_gets_a_token_in_each_step_while_a_long_prompt_prefills(bench, words):
    served = bench(batch_tokens=64)
    answers = [served.submit(words(10, seed=seed), tokens=60) for seed in range(8)]
    served.step()
    long = served.submit(words(1000, seed=99), tokens=1)
    while not any(isinstance(event, Started) for event in long.events) or long.end is None:
        before = [len(answer.ids) for answer in answers]
        served.step()
        assert [len(answer.ids) for answer in answers] == [count + 1 for count in before]
    served.finish()


@pytest.mark.parametrize(("block_size", "batch_tokens"), [(128, 128), (16, 16), (64, 70)])
def test_a_prompt_prefills_however_little_the_decoding_ones_leave_of_a_step(bench, words, block_size, batch_tokens):
    served = bench(block_size=block_size, batch_tokens=batch_tokens, running=8)
    for seed in range(7):
        served.submit(words(3, seed=seed), tokens=300)
    for _ in range(4):
        served.step()
    long = served.submit(words(389, seed=99), tokens=1)
    for _ in range(60):
        served.step()
    assert long.end is not None
    served.finish()


def test_a_request_on_which_the_model_fails_ends_alone(bench, reference, words, monkeypatch):
    served, prompts = bench(), [words(30, seed=seed) for seed in range(5)]
    forward = served.engine._model.forward

    def fail(batch, *pool):
        if str(prompts[2])[1:-1] in str(batch.token_ids[0].tolist()):
            raise RuntimeError("injected")
        return forward(batch, *pool)

    monkeypatch.setattr(served.engine._model, "forward", fail)
    answers = served.run(*prompts, samples=2)
    assert [isinstance(answer.end, Failed) for answer in answers] == [False, False, True, False, False]
    assert [answers[i].ids for i in (0, 1, 3, 4)] == [reference(prompts[i]) for i in (0, 1, 3, 4)]


def test_keys_that_are_no_numbers_are_not_kept_by_a_chunk_that_samples_nothing(bench, reference, words, monkeypatch):
    served, prompt = bench(batch_tokens=64), words(200)
    forward = served.engine._model.forward
    monkeypatch.setattr(served.engine._model, "forward", lambda *arguments: forward(*arguments) * float("nan"))
    broken = served.submit(prompt)
    served.step()
    monkeypatch.setattr(served.engine._model, "forward", forward)
    served.finish()
    assert broken.end.error.reason == "NOT_A_NUMBER"
    (again,) = served.run(prompt)
    assert (again.cached, again.ids) == (0, reference(prompt))


def test_a_receiver_that_fails_costs_its_own_request_alone(bench, reference, words):
    served, prompts = bench(), [words(30, seed=seed) for seed in range(3)]
    answers = [served.submit(prompt) for prompt in prompts]

    def failing(_):
        raise RuntimeError("the receiver is gone")

    answers[1].job.deliver = failing
    served.finish()
    assert [answers[i].ids for i in (0, 2)] == [reference(prompts[i]) for i in (0, 2)]


def test_a_broken_pool_keeps_nobody_waiting(bench, words, monkeypatch):
    served, told = bench(running=2), threading.Event()
    served.engine._on_death = told.set
    answers = [served.submit(words(20, seed=seed), tokens=1000) for seed in range(6)]
    served.step()
    monkeypatch.setattr(served.cache.pool, "free", lambda _: 1 / 0)
    monkeypatch.setattr(served.cache, "reclaim", lambda: 1 / 0)
    served.engine.start()
    assert told.wait(60)
    served.engine._thread.join(60)
    assert [answer.end.error.reason for answer in answers] == ["ENGINE_ENDED"] * 6


def test_a_request_that_is_stopped_while_it_waits_starts_before_it_ends(bench, words):
    served = bench(running=1)
    served.submit(words(20), tokens=50)
    waiting = served.submit(words(20, seed=1))
    served.step()
    served.engine.stop_sample(waiting.job, 0)
    served.finish()
    assert [type(event) for event in waiting.events] == [Started, Finished]
    assert waiting.finished.usage.completion_tokens == 0


def test_many_rules_on_tokens_cost_a_request_once(bench, words):
    served, allowed = bench(), tuple(range(200))
    (answer,) = served.run(
        words(20),
        tokens=8,
        allowed=allowed,
        logit_bias=tuple((token, 1.0) for token in allowed),
        stops=[5, 6],
        min_tokens=8,
    )
    assert all(token in allowed and token not in {5, 6} for token in answer.ids[:7])
    assert answer.job.rules is not None


def test_the_cache_is_not_filled_by_short_prompts_that_were_preempted(bench, words):
    served = bench(tokens=160, block_size=4, limits=KVLimits(min_cached_tokens=50))
    served.run(*[words(20, seed=index) for index in range(8)], tokens=40)
    assert served.engine.scheduler.preemptions > 0
    assert served.cache.stats.nodes == 0


def test_on_its_thread_the_engine_sleeps_wakes_and_stops(bench, words):
    served, ended = bench(), threading.Event()
    served.engine.start()
    answer = served.submit(words(20), tokens=3)
    answer.events = _Watched(answer.events, ended)
    served.engine.submit(answer.job.request, answer.events.append)
    assert ended.wait(60)
    served.engine.stop()
    assert not served.engine._thread.is_alive()


def test_an_engine_that_stops_tells_those_who_wait(bench, words):
    served = bench(running=1)
    answers = [served.submit(words(20, seed=seed), tokens=None) for seed in range(3)]
    served.engine.start()
    served.engine.stop()
    assert [answer.end.error.code for answer in answers] == [grpc.StatusCode.UNAVAILABLE] * 3
    served.cache.check()


def test_an_engine_that_breaks_tells_everyone_and_says_so(bench, words, monkeypatch):
    served, told = bench(), threading.Event()
    served.engine._on_death = told.set
    monkeypatch.setattr(served.engine.scheduler, "schedule", lambda: 1 / 0)
    answer = served.submit(words(20))
    served.engine.start()
    assert told.wait(60)
    assert answer.end.error.code is grpc.StatusCode.INTERNAL
    served.engine._thread.join(60)
    with pytest.raises(HermesError) as refusal:
        served.submit(words(20))
    assert refusal.value.reason == "ENGINE_ENDED"


class _Watched(list):
    """Events that set a flag when the last one comes."""

    def __init__(self, events, ended):
        super().__init__(events)
        self._ended = ended

    def append(self, event):
        super().append(event)
        if isinstance(event, Finished | Failed):
            self._ended.set()
