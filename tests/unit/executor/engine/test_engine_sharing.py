"""Requests that share a beginning at the same time: one computes it, the others wait for just that."""

import time

import pytest

from executor.events import Failed, Started
from executor.kv.eviction import KVLimits
from executor.scheduler import MAX_OVERTAKEN


class _Broken:
    """A model whose forward fails."""

    def __init__(self, model):
        self.device, self.dtype = model.device, model.dtype

    def forward(self, *_):
        raise RuntimeError("injected")


def computed(answers):
    """Prompt tokens that were run for these answers."""
    return sum(answer.finished.usage.prompt_tokens - answer.cached for answer in answers)


def test_sixteen_at_once_compute_their_prefix_once_and_hold_it_once(bench, reference, words):
    served, head = bench(batch_tokens=256), words(1000)
    prompts = [head + words(40, seed=10 + index) for index in range(16)]
    answers = [served.submit(prompt, tokens=8) for prompt in prompts]
    most = 0
    while served.step():
        most = max(most, served.cache.stats.blocks_active)
    size = served.cache.block_size
    assert computed(answers) <= 1000 + 16 * (40 + size)
    assert most <= 1000 // size + 16 * ((40 + 8) // size + 2)
    assert [answer.ids for answer in answers] == [reference(prompt, 8) for prompt in prompts]
    assert served.engine.scheduler.waited_requests == 15


@pytest.mark.parametrize("agreed", [3, 4, 8, 15, 16])
def test_an_earlier_prompt_that_agrees_on_a_part_of_a_block_makes_nobody_compute_more(bench, words, agreed):
    served, head = bench(batch_tokens=256), words(1000)
    served.run(head[:agreed] + words(40, seed=9), tokens=2)
    answers = [served.submit(head + words(40, seed=10 + index), tokens=2) for index in range(16)]
    served.finish()
    assert computed(answers) <= 1000 + 16 * (40 + served.cache.block_size)


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("fate", ["cancelled", "failed"])
def test_another_takes_over_from_an_owner_who_goes_at_any_step_of_its_prefill(
    bench, reference, words, monkeypatch, *, step, fate
):
    served, head = bench(batch_tokens=128), words(500)
    prompts = [head + words(10, seed=10 + index) for index in range(16)]
    owner, *others = [served.submit(prompt, tokens=6) for prompt in prompts]
    for _ in range(step - 1):
        served.step()
    if fate == "cancelled":
        served.step()
        served.engine.cancel(owner.job)
    else:
        monkeypatch.setattr(served.engine, "_model", _Broken(served.engine._model))
        served.step()
        monkeypatch.undo()
        assert isinstance(owner.end, Failed)
    served.finish()
    stayed = [(answer, prompt) for answer, prompt in zip(others, prompts[1:], strict=True) if answer.end is not None]
    finished = [(answer, prompt) for answer, prompt in stayed if not isinstance(answer.end, Failed)]
    assert len(finished) == 15 or fate == "failed"
    assert [answer.ids for answer, _ in finished] == [reference(prompt, 6) for _, prompt in finished]
    assert computed([answer for answer, _ in finished]) <= 500 + 128 + 15 * (10 + served.cache.block_size)


def test_owners_that_will_not_publish_are_not_waited_for(bench, words):
    served, head = bench(batch_tokens=64), words(300)
    first = served.submit(head + words(5, seed=1), write=False)
    second = served.submit(head + words(5, seed=2))
    served.step()
    served.step()
    assert any(isinstance(event, Started) for event in first.events)
    assert served.engine.scheduler.waited_requests == 0
    served.finish()
    assert second.cached == 0


def test_requests_of_other_namespaces_or_that_must_not_read_do_not_wait(bench, words):
    served, head = bench(batch_tokens=64), words(300)
    served.submit(head + words(5, seed=1))
    others = [served.submit(head, namespace="other"), served.submit(head, read=False)]
    served.step()
    assert len(served.engine.scheduler.running) == 3
    served.finish()
    assert [answer.cached for answer in others] == [0, 0]


def test_prompts_that_are_beginnings_of_each_other_share_at_once(bench, reference, words):
    served, longest = bench(batch_tokens=128), words(600)
    prompts = [longest[:length] for length in (600, 450, 301, 150, 601)]
    answers = served.run(*prompts, tokens=6)
    assert [answer.ids for answer in answers] == [reference(prompt, 6) for prompt in prompts]
    assert computed(answers) <= 600 + len(prompts) * (1 + 16)


def test_a_cold_request_is_overtaken_by_a_bounded_number_of_hitting_ones(bench, words):
    served, head = bench(running=1, waiting=200), words(200)
    served.run(head)
    served.submit(head, tokens=2)
    cold = served.submit(words(200, seed=9), tokens=2)
    later = [served.submit(head + words(3, seed=index), tokens=2) for index in range(3 * MAX_OVERTAKEN)]
    while cold.end is None:
        served.step()
    overtook = sum(answer.end is not None for answer in later)
    assert 0 < overtook <= MAX_OVERTAKEN
    served.finish()


def test_without_the_prefix_cache_nobody_waits(bench, words):
    served = bench(limits=KVLimits(prefix_cache=False))
    served.run(*[words(100)] * 4)
    assert served.engine.scheduler.waited_requests == 0


@pytest.mark.parametrize("seed", range(3))
def test_forced_to_preempt_at_every_other_step_all_outputs_stay(bench, words, monkeypatch, seed):
    prompts = [words(20 + 9 * index, seed=seed * 10 + index) for index in range(6)]
    options = [
        {"temperature": 0.0 if index % 2 else 0.9, "seed": index, "frequency_penalty": 0.3 * (index % 3)}
        for index in range(6)
    ]

    def outputs(served):
        answers = [served.submit(p, tokens=15, **o) for p, o in zip(prompts, options, strict=True)]
        served.finish()
        return [answer.ids for answer in answers]

    forced = bench()
    scheduler = forced.engine.scheduler
    schedule = scheduler.schedule

    def preempting():
        if forced.steps % 2 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[-1])
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", preempting)
    assert outputs(forced) == outputs(bench())
    assert scheduler.preemptions > 0


def test_a_pin_ends_by_time_also_while_the_engine_sleeps(bench, words):
    served, prefix = bench(), words(64)
    (answer,) = served.run(prefix, tokens=0)
    scope, pins = answer.job.request.scope, served.cache.pins
    served.engine.start()

    def pinned() -> int:
        return served.engine.call(lambda: served.cache.stats.blocks_pinned).result(60)

    long = served.engine.call(lambda: pins.pin(scope, prefix, time.monotonic() + 1e12)).result(60)
    assert pinned() == 4
    served.engine.call(lambda: pins.unpin(long.id)).result(60)
    assert pinned() == 0
    served.engine.call(lambda: pins.pin(scope, prefix, time.monotonic() + 0.05)).result(60)
    deadline = time.monotonic() + 60
    while served.engine.load.blocks_pinned:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.engine.stop()


def test_a_new_prompt_that_pins_shut_out_is_told_and_not_answered_with_nothing(bench, words):
    served, prefix = bench(tokens=160), words(80)
    (answer,) = served.run(prefix, tokens=0)
    pin = served.cache.pins.pin(answer.job.request.scope, prefix, time.monotonic() + 1000)
    refused = served.submit(words(120, seed=1))
    served.step()
    assert refused.end.error.reason == "POOL_PINNED"
    served.cache.pins.unpin(pin.id)
    (taken,) = served.run(words(120, seed=1))
    assert taken.ids


def test_a_request_waits_for_few_owners_who_go_away_and_then_runs(bench, words):
    served, head = bench(block_size=128, batch_tokens=32), words(100)

    def ask(seed):
        return served.submit(head + words(100, seed=seed), read=False)

    owner = ask(1)
    served.step()
    patient = served.submit(head + words(100, seed=2))
    for seed in range(3, 40):
        follower = ask(seed)
        served.step()
        served.engine.cancel(owner.job)
        owner = follower
        if any(isinstance(event, Started) for event in patient.events):
            break
    else:
        pytest.fail("it never started")
    served.finish()


def test_a_few_tokens_in_common_are_not_waited_for(bench, words):
    served, head = bench(block_size=128, batch_tokens=2048), words(8)
    answers = [served.submit(head + words(100, seed=seed)) for seed in range(8)]
    served.step()
    assert len(served.engine.scheduler.running) == 8
    served.finish()
    assert served.engine.scheduler.waited_requests == 0
    assert all(answer.ids for answer in answers)
