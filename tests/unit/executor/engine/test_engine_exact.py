"""Whatever the cache had, and whoever ran beside: the tokens are those of transformers' own generate."""

import pytest

from executor.kv.eviction import KVLimits


@pytest.fixture(params=["torch", "native"])
def bench(request, bench):
    """Each test runs with torch's attention, and with the native kernel."""
    kernel = request.getfixturevalue("native_kernel") if request.param == "native" else None

    def build(**options):
        made = bench(**options)
        made.engine.kernel = kernel
        return made

    return build


def test_the_kernel_may_come_at_any_step(bench, reference, words, native_kernel):
    served, head = bench(), words(130)
    served.engine.kernel = None
    prompts = [head + words(5 + index, seed=index) for index in range(3)]
    answers = [served.submit(prompt, tokens=20) for prompt in prompts]
    for _ in range(7):
        served.step()
    served.engine.adopt(lambda: setattr(served.engine, "kernel", native_kernel))
    assert served.engine.kernel is None, "not in the middle of a step"
    served.finish()
    assert served.engine.kernel is native_kernel
    assert [answer.ids for answer in answers] == [reference(prompt, 20) for prompt in prompts]


def test_cold_prompts_of_any_length(bench, reference, words):
    prompts = [words(count, seed=count) for count in (1, 2, 15, 16, 17, 64, 300, 513)]
    answers = bench().run(*prompts)
    assert [answer.ids for answer in answers] == [reference(prompt) for prompt in prompts]
    assert [answer.cached for answer in answers] == [0] * len(prompts)


@pytest.mark.parametrize("shared", [16, 96, 100, 1003])
def test_hits_of_whole_blocks_and_parts_of_one(bench, reference, words, shared):
    served, head = bench(), words(shared)
    first, second = head + words(20, seed=1), head + words(30, seed=2)
    served.run(first)
    (answer,) = served.run(second)
    assert answer.cached == shared
    assert answer.ids == reference(second)


def test_a_prompt_wholly_in_the_cache_runs_its_last_token(bench, reference, words):
    served, prompt = bench(), words(101)
    served.run(prompt)
    (answer,) = served.run(prompt)
    assert answer.cached == 100
    assert answer.ids == reference(prompt)


def test_a_prompt_that_extends_an_answer(bench, reference, words):
    served, prompt = bench(), words(50)
    (first,) = served.run(prompt)
    longer = prompt + first.ids + words(9, seed=1)
    (second,) = served.run(longer)
    assert second.cached == 50 + len(first.ids) - 1  # the last token was sampled, but never ran
    assert second.ids == reference(longer)


def test_forks_of_one_prefix_in_one_batch_leave_each_other_alone(bench, reference, words):
    served, head = bench(), words(405)
    served.run(head)
    prompts = [head + words(5 + index, seed=10 + index) for index in range(12)]
    answers = served.run(*prompts, tokens=20)
    assert [answer.ids for answer in answers] == [reference(prompt, 20) for prompt in prompts]
    assert [answer.cached for answer in answers] == [405] * 12


def test_nested_forks_share_both_stretches(bench, reference, words):
    served, head = bench(), words(320)
    branches = [head + words(304, seed=20 + index) for index in range(3)]
    served.run(*branches)
    prompts = [branch + words(7, seed=30 + index) for branch in branches for index in range(4)]
    answers = served.run(*prompts, tokens=16)
    assert [answer.ids for answer in answers] == [reference(prompt, 16) for prompt in prompts]


def test_hits_after_eviction_and_refill(bench, reference, words):
    served, prompt = bench(tokens=512), words(200)
    served.run(prompt)
    for seed in range(1, 6):
        served.run(words(300, seed=seed))
    (gone,) = served.run(prompt)
    (back,) = served.run(prompt)
    assert served.cache.stats.evicted_blocks > 0
    assert gone.cached < back.cached == 199
    assert gone.ids == back.ids == reference(prompt)


@pytest.mark.parametrize("batch_tokens", [16, 17, 33, 64, 100, 512])
def test_prefill_in_chunks(bench, reference, words, batch_tokens):
    prompts = [words(count, seed=count) for count in (5, 100, 301)]
    answers = bench(batch_tokens=batch_tokens, running=8).run(*prompts)
    assert [answer.ids for answer in answers] == [reference(prompt) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_any_block_size(bench, reference, words, block_size):
    served, head = bench(block_size=block_size), words(130)
    prompts = [head + words(index, seed=index) for index in range(1, 5)]
    served.run(head)
    answers = served.run(*prompts)
    assert [answer.ids for answer in answers] == [reference(prompt) for prompt in prompts]


def test_preempted_answers_go_on_without_a_seam(bench, reference, words):
    served = bench(tokens=160, block_size=4)
    prompts = [words(30, seed=index) for index in range(6)]
    answers = served.run(*prompts, tokens=40)
    assert served.engine.scheduler.preemptions > 0
    assert [answer.ids for answer in answers] == [reference(prompt, 40) for prompt in prompts]
    assert all(answer.finished.usage.completion_tokens == 40 for answer in answers)


def test_a_preempted_sample_draws_the_same_tokens(bench, words):
    prompts = [words(30, seed=index) for index in range(6)]
    options = [{"temperature": 0.9, "seed": index, "repetition_penalty": 1.3} for index in range(6)]
    tight, wide = bench(tokens=160, block_size=4), bench()
    outputs = []
    for served in (tight, wide):
        answers = [served.submit(p, tokens=40, **o) for p, o in zip(prompts, options, strict=True)]
        served.finish()
        outputs.append([answer.ids for answer in answers])
    assert tight.engine.scheduler.preemptions > 0
    assert outputs[0] == outputs[1]


def test_the_same_seed_draws_the_same_tokens_alone_and_among_others(bench, words):
    prompt, mine = words(40), {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 42}
    (alone,) = bench().run(prompt, tokens=30, **mine)
    crowd = bench()
    answer = crowd.submit(prompt, tokens=30, **mine)
    for index in range(15):
        crowd.submit(words(20 + 3 * index, seed=index), tokens=40, temperature=1.5, presence_penalty=0.5, seed=index)
    crowd.finish()
    assert answer.ids == alone.ids
    (other,) = bench().run(prompt, tokens=30, **mine | {"seed": 43})
    assert other.ids != alone.ids


def test_without_the_prefix_cache_answers_are_the_same_and_nothing_is_kept(bench, reference, words):
    served, prompt = bench(limits=KVLimits(prefix_cache=False)), words(100)
    first, second = served.run(prompt) + served.run(prompt)
    assert first.ids == second.ids == reference(prompt)
    assert (first.cached, second.cached) == (0, 0)
    assert served.cache.stats.nodes == 0
