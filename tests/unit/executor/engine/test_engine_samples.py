"""Several samples of one prompt, and how likely the model held each token."""

import pytest
import torch

from executor.events import Finished, FinishReason, Generated, Started
from executor.kv.eviction import KVLimits


def ends(answer):
    return {event.index: event for event in answer.events if isinstance(event, Finished)}


def test_greedy_samples_equal_each_other_and_the_only_one(bench, reference, words):
    prompt = words(100)
    (answer,) = bench().run(prompt, samples=4)
    assert [answer.ids_of(index) for index in range(4)] == [reference(prompt)] * 4


def test_seeded_samples_differ_and_are_the_same_on_each_run(bench, words):
    prompt, drawn = words(100), {"temperature": 1.0, "seed": 5, "samples": 4}
    first, second = bench().run(prompt, **drawn) + bench().run(prompt, **drawn)
    samples = [first.ids_of(index) for index in range(4)]
    assert samples == [second.ids_of(index) for index in range(4)]
    assert len({tuple(ids) for ids in samples}) == 4
    (alone,) = bench().run(prompt, **drawn | {"samples": 1})
    assert alone.ids == samples[0]


@pytest.mark.parametrize("write", [True, False])
def test_samples_hold_one_prompt_and_their_own_tails(bench, words, write):
    served, prompt = bench(), words(1003)
    answer = served.submit(prompt, tokens=8, samples=4, temperature=1.0, write=write)
    while not answer.ids_of(3):
        served.step()
    assert served.cache.stats.blocks_active == 1003 // 16 + 4
    served.finish()
    assert sum(isinstance(event, Started) for event in answer.events) == 1
    assert served.cache.stats.nodes == 0 or write


def test_one_stopped_sample_leaves_the_others(bench, words):
    served = bench()
    answer = served.submit(words(50), tokens=20, samples=3, temperature=1.0)
    while len(answer.ids_of(1)) < 5:
        served.step()
    served.engine.stop_sample(answer.job, 1)
    served.engine.stop_sample(answer.job, 1)
    served.finish()
    assert [len(answer.ids_of(index)) for index in range(3)] == [20, 5, 20]
    assert [ends(answer)[index].reason for index in range(3)] == [
        FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH,
    ]  # fmt: skip


@pytest.mark.parametrize("index", [0, 2])
def test_a_sample_stopped_before_it_began_has_no_tokens_and_the_others_all(bench, words, index):
    served = bench(batch_tokens=32)
    answer = served.submit(words(100), tokens=4, samples=3)
    served.step()
    served.engine.stop_sample(answer.job, index)
    served.finish()
    assert sorted(ends(answer)) == [0, 1, 2]
    assert [len(answer.ids_of(i)) for i in range(3)] == [0 if i == index else 4 for i in range(3)]


def test_usage_comes_with_the_last_sample_and_counts_them_all(bench, words):
    (answer,) = bench().run(words(50), tokens=6, samples=3)
    finished = [event for event in answer.events if isinstance(event, Finished)]
    assert [event.usage is None for event in finished] == [True, True, False]
    assert finished[-1].usage.completion_tokens == 18
    assert finished[-1].usage.prompt_tokens == 50


def test_more_samples_than_may_run_take_turns(bench, reference, words):
    prompt = words(60)
    (answer,) = bench(running=3).run(prompt, samples=8)
    assert [answer.ids_of(index) for index in range(8)] == [reference(prompt)] * 8


def test_samples_in_a_pool_too_small_for_them_take_turns(bench, reference, words):
    prompt = words(60)
    (answer,) = bench(tokens=112, block_size=4).run(prompt, samples=6, tokens=30)
    assert [answer.ids_of(index) for index in range(6)] == [reference(prompt, 30)] * 6


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_cancelled_request_takes_all_its_samples_along(bench, words, steps):
    served = bench(batch_tokens=32)
    answer = served.submit(words(60), tokens=50, samples=4)
    for _ in range(steps):
        served.step()
    served.engine.cancel(answer.job)
    served.finish()
    assert not ends(answer)


def test_log_probabilities_are_the_models_own(bench, network, words):
    prompt = words(40)
    (answer,) = bench().run(
        prompt, tokens=6, temperature=0.7, seed=1, logprobs=5, repetition_penalty=1.5, logit_bias=((3, 5.0),)
    )
    ids = answer.ids
    own = network.config._attn_implementation
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    network.set_attn_implementation(own)
    expected = logits.log_softmax(-1)
    choices = [event.choice for event in answer.events if isinstance(event, Generated)]
    for row, choice in zip(expected, choices, strict=True):
        values, likeliest = row.topk(5)
        assert choice.logprob == pytest.approx(row[choice.token_id].item(), abs=1e-4)
        assert [top.token_id for top in choice.top] == likeliest.tolist()
        assert [top.logprob for top in choice.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_log_probabilities_come_only_where_asked_for_and_as_many(bench, words):
    served = bench()
    counts = [None, 0, 2]
    answers = [served.submit(words(10, seed=i), tokens=2, logprobs=count) for i, count in enumerate(counts)]
    served.finish()
    told = [next(e.choice for e in answer.events if isinstance(e, Generated)) for answer in answers]
    assert [choice.logprob is None for choice in told] == [True, False, False]
    assert [len(choice.top) for choice in told] == [0, 0, 2]


def test_a_prefix_is_computed_without_generating(bench, words):
    served, prefix = bench(), words(100)
    (answer,) = served.run(prefix, tokens=0)
    assert answer.ids == []
    assert served.cache.covers(answer.job.request.scope, prefix) == 100
    (hit,) = served.run([*prefix, *words(10, seed=1)])
    assert hit.cached == 100


@pytest.mark.parametrize(
    ("cache", "limits"),
    [
        ({}, KVLimits()),
        ({"write": False}, KVLimits()),
        ({"read": False}, KVLimits()),
        ({"read": False, "write": False}, KVLimits()),
        ({}, KVLimits(min_cached_tokens=2000)),
        ({}, KVLimits(prefix_cache=False)),
    ],
)
def test_samples_that_take_turns_compute_their_prompt_once(bench, reference, words, tokens_run, *, cache, limits):
    served, prompt = bench(running=2, limits=limits), words(1003)
    (answer,) = served.run(prompt, samples=8, tokens=6, **cache)
    assert sum(tokens_run) <= 1003 + 8 * (6 + served.cache.block_size)
    assert [answer.ids_of(index) for index in range(8)] == [reference(prompt, 6)] * 8
    assert answer.cached == 0


@pytest.mark.parametrize("write", [True, False])
def test_the_first_sample_stopped_while_it_computes_the_prompt_computes_it_for_the_others(
    bench, words, tokens_run, write
):
    served, prompt = bench(batch_tokens=128), words(500)
    answer = served.submit(prompt, samples=4, tokens=6, write=write)
    served.step()
    served.step()
    served.engine.stop_sample(answer.job, 0)
    served.finish()
    assert sum(tokens_run) == 500 + 3 * 5
    assert [len(answer.ids_of(index)) for index in range(4)] == [0, 6, 6, 6]


def test_samples_that_are_all_stopped_end_at_once_and_compute_nothing_more(bench, words, tokens_run):
    served = bench(batch_tokens=128)
    answer = served.submit(words(500), samples=3)
    served.step()
    for index in range(3):
        served.engine.stop_sample(answer.job, index)
    served.finish()
    assert sum(tokens_run) == 128
    assert [type(event) for event in answer.events] == [Started, *[Finished] * 3]
    assert answer.events[-1].usage.completion_tokens == 0


def test_a_first_sample_stopped_while_it_waits_hides_no_hit(bench, words):
    served, prompt = bench(running=1), words(101)
    served.run(prompt, tokens=0)
    served.submit(words(20, seed=1), tokens=5)
    served.step()
    answer = served.submit(prompt, samples=2, tokens=3)
    served.step()
    served.engine.stop_sample(answer.job, 0)
    before = served.engine.jobs.admissions
    served.finish()
    assert answer.cached == 100
    after = served.engine.jobs.admissions
    assert (after.requests - before.requests, after.cached_tokens - before.cached_tokens) == (1, 100)


@pytest.mark.parametrize("write", [True, False])
def test_a_flush_between_samples_that_take_turns_changes_no_answer(bench, reference, words, write):
    served, prompt = bench(running=2), words(100)
    answer = served.submit(prompt, samples=6, tokens=6, write=write)
    while served.step():
        served.cache.flush(None)
    assert [answer.ids_of(index) for index in range(6)] == [reference(prompt, 6)] * 6


def test_samples_that_end_leave_nothing_of_what_they_kept_to_themselves(bench, words):
    served = bench(running=2)
    answer = served.submit(words(200), samples=6, tokens=6, write=False)
    while len(ends(answer)) < 3:
        served.step()
    assert served.cache.stats.nodes >= 200 // 16
    served.engine.cancel(answer.job)
    served.step()
    assert served.cache.stats.nodes == 0
    assert served.cache.stats.blocks_free == served.cache.stats.blocks_total


def test_samples_of_a_scope_for_which_there_is_no_root_left_find_their_prompt_too(bench, words, tokens_run):
    served = bench(running=3, limits=KVLimits(max_roots=1))
    busy = served.submit(words(20), namespace="busy", tokens=200)
    served.step()
    tokens_run.clear()
    answer = served.submit(words(500, seed=1), samples=6, tokens=6)
    while len(ends(answer)) < 6:
        served.step()
    assert busy.end is None
    assert sum(tokens_run) <= 500 + 6 * (6 + 16) + len(tokens_run)
    served.finish()
