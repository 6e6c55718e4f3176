"""Sequences that give way: their place in the queue, what they find again, and what is counted."""

import pytest

from executor.events import Failed
from executor.kv.eviction import KVLimits


def preempt(served, answer):
    """Takes the first sample's blocks, as a step does that finds none."""
    served.engine.scheduler._preempt(answer.job.samples[0])
    served.cache.check()


@pytest.mark.parametrize("cache", [{}, {"write": False}, {"read": False}, {"read": False, "write": False}])
def test_a_preempted_request_finds_what_it_computed(bench, reference, words, tokens_run, cache):
    served, prompt = bench(batch_tokens=128), words(501)
    answer = served.submit(prompt, **cache)
    for _ in range(6):
        served.step()
    preempt(served, answer)
    served.finish()
    assert sum(tokens_run) <= 501 + 12 + served.cache.block_size
    assert answer.ids == reference(prompt)


def test_what_must_not_be_read_is_not_read_after_a_preemption_either(bench, reference, words, tokens_run):
    served, prompt = bench(batch_tokens=128), words(501)
    served.run(prompt, tokens=0)
    tokens_run.clear()
    answer = served.submit(prompt, read=False, tokens=6)
    served.step()
    preempt(served, answer)
    served.finish()
    assert sum(tokens_run) == 501 + 5
    assert (answer.ids, answer.cached) == (reference(prompt, 6), 0)


def test_hits_and_copied_tokens_are_counted_once_however_often_a_request_is_admitted(bench, words):
    served, head = bench(), words(100)
    served.run(head, tokens=0)
    (branch,) = served.cache.describe(None, 1)
    answer = served.submit(head + words(30, seed=1), tokens=20)
    served.step()
    copied = served.cache.stats.copied_tokens
    assert copied == 100 % 16
    for _ in range(3):
        preempt(served, answer)
        served.step()
    served.finish()
    assert served.cache.stats.copied_tokens == copied
    assert {b.id: b.hits for b in served.cache.describe(None, 9)}[branch.id] == branch.hits + 1
    assert served.engine.jobs.admissions[:3] == (1, 130, 100)


def test_a_preempted_request_without_its_blocks_is_not_overtaken_by_hitting_ones(bench, words):
    served, head = bench(running=1), words(200)
    served.run(head, tokens=0)
    first = served.submit(words(300, seed=1), tokens=20)
    served.step()
    hitting = [served.submit(head, tokens=2) for _ in range(5)]
    served.cache.flush(None)
    preempt(served, first)
    served.cache.flush(None)
    served.step()
    assert [s.job for s in served.engine.scheduler.running] == [first.job]
    served.finish()
    assert all(answer.ids for answer in hitting)


def test_preempted_requests_wait_ahead_of_new_ones_and_in_order_of_arrival(bench, words):
    served = bench(running=4)
    answers = [served.submit(words(40, seed=seed), tokens=9) for seed in range(6)]
    served.step()
    for answer in reversed(answers[1:4]):
        preempt(served, answer)
    assert [s.job for s in served.engine.scheduler.waiting] == [answer.job for answer in answers[1:]]
    served.finish()


def test_requests_are_counted_and_not_their_samples(bench, words):
    served = bench(running=4, waiting=2)
    first = served.submit(words(40), tokens=9, samples=8)
    served.step()
    others = [served.submit(words(40, seed=seed), tokens=9) for seed in range(1, 4)]
    served.step()
    assert (served.engine.load.running, served.engine.load.waiting) == (1, 2)
    assert [b.running for b in served.cache.describe(None, 9, (job.nodes() for job in served.engine.jobs))] == [1]
    served.finish()
    assert [answer.end.error.reason for answer in others if not answer.ids] == ["QUEUE_FULL"]
    assert all(len(first.ids_of(index)) == 9 for index in range(8))


def test_samples_that_the_pool_cannot_hold_at_once_find_their_prompt_again(bench, words, tokens_run):
    prompt, drawn = words(400), {"samples": 4, "tokens": 60, "temperature": 1.0, "seed": 3}
    (roomy,) = bench().run(prompt, **drawn)
    tokens_run.clear()
    served = bench(tokens=512, limits=KVLimits(min_cached_tokens=10_000))
    (answer,) = served.run(prompt, **drawn)
    assert served.engine.scheduler.preemptions > 0
    assert [answer.ids_of(index) for index in range(4)] == [roomy.ids_of(index) for index in range(4)]
    assert sum(tokens_run) < 2 * 400 + 4 * 60 * 2


@pytest.mark.parametrize("write", [True, False])
def test_samples_whose_prompt_was_evicted_compute_it_once_for_all_of_them(bench, reference, words, tokens_run, write):
    served, prompt = bench(batch_tokens=128), words(501)
    answer = served.submit(prompt, samples=4, tokens=8, write=write)
    while not answer.ids_of(3):
        served.step()
    for sample in reversed(answer.job.samples):
        served.engine.scheduler._preempt(sample)
    served.cache._evictor.make_room(served.cache.available_blocks)
    assert served.cache.stats.nodes == 0
    served.finish()
    assert sum(tokens_run) <= 2 * 501 + 4 * (8 + served.cache.block_size)
    assert [answer.ids_of(index) for index in range(4)] == [reference(prompt, 8)] * 4
    assert served.engine.scheduler.waited_requests == 0


def test_the_queue_has_its_bound_also_where_blocks_are_short_and_places_are_not(bench, words):
    served = bench(tokens=512, running=32, waiting=3)
    served.submit(words(400), tokens=80)
    served.step()
    answers = [served.submit(words(200, seed=seed), tokens=2) for seed in range(1, 9)]
    served.step()
    served.step()
    late = [served.submit(words(200, seed=seed), tokens=2) for seed in range(9, 12)]
    served.step()
    assert all(answer.end.error.reason == "QUEUE_FULL" for answer in late)
    served.finish()
    assert all(answer.ids for answer in answers if not isinstance(answer.end, Failed))
