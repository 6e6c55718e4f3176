"""What is computed once is not computed again: to the token, in its namespace, where the caller allows it."""

import pytest

from executor.kv.eviction import KVLimits


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 9])
def test_the_second_of_two_prompts_reuses_exactly_what_they_share(bench, words, block_size):
    served, head = bench(block_size=block_size), words(1003)
    served.run([*head, 1, *words(30, seed=1)], tokens=1)
    (answer,) = served.run([*head, 2, *words(30, seed=2)], tokens=1)
    assert answer.cached == 1003


def test_each_round_of_a_chat_computes_only_its_own_tokens(bench, words):
    served, history, answer = bench(), words(500), None
    for turn in range(5):
        question = words(40, seed=turn + 1)
        known = len(history)
        history = history + question
        (answer,) = served.run(history, tokens=25)
        recomputed = answer.finished.usage.prompt_tokens - answer.cached
        if turn:
            slack = 1 + KVLimits().min_copy_tokens  # the token sampled last, and a partial match too short to copy
            assert recomputed < len(question) + slack
            assert answer.cached > known - slack
        history = history + answer.ids


def test_namespaces_share_nothing(bench, words):
    served, prompt = bench(), words(200)
    served.run(prompt, namespace="a")
    held = served.cache.stats.nodes
    (other,) = served.run(prompt, namespace="b")
    assert other.cached == 0
    assert served.cache.stats.nodes == 2 * held
    (same,) = served.run(prompt, namespace="a")
    assert same.cached == 199


def test_a_request_that_must_not_read_finds_nothing_and_stores_nothing_twice(bench, reference, words):
    served, prompt = bench(), words(100)
    served.run(prompt)
    held = served.cache.stats.nodes
    (answer,) = served.run(prompt, read=False)
    assert (answer.cached, answer.ids) == (0, reference(prompt))
    assert served.cache.stats.nodes == held


def test_a_request_that_must_not_write_leaves_nothing(bench, reference, words):
    served, prompt = bench(), words(100)
    (answer,) = served.run(prompt, write=False)
    assert answer.ids == reference(prompt)
    assert served.cache.stats.nodes == 0


def test_cached_tokens_are_counted_once_whatever_happens_later(bench, words):
    served = bench(tokens=160, block_size=4)
    answers = served.run(*[words(30, seed=index) for index in range(6)], tokens=40)
    assert served.engine.scheduler.preemptions > 0
    assert [answer.cached for answer in answers] == [0] * 6
    assert all(answer.finished.usage.cached_tokens == 0 for answer in answers)
