"""What the tree finds, keeps and prunes."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.kv.pool import IntegrityError

MakeRunner = Callable[..., Any]


def numbers(count: int, *, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def keys_in(runner: Any) -> list[tuple[int, ...]]:
    return [node.tokens for node in runner.cache.tree.walk()]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("agreed", [1, 7, 16, 99, 128])
def test_the_second_prompt_reuses_every_token_it_agrees_on_whatever_the_block_size(
    make_runner: MakeRunner, block_size: int, agreed: int
):
    runner = make_runner(blocks=600, block_size=block_size)
    assert runner.run(numbers(150)) == 0
    assert runner.run(numbers(agreed) + numbers(20, start=1000)) == agreed


def test_a_prompt_wholly_in_the_cache_leaves_its_last_token_to_run(make_runner: MakeRunner):
    runner = make_runner()
    for length in (8, 11):
        runner.run(numbers(length))
        assert runner.run(numbers(length)) == length - 1


@pytest.mark.parametrize("prompt", [[], [1]])
def test_a_prompt_of_no_more_than_one_token_finds_nothing(make_runner: MakeRunner, prompt: list[int]):
    runner = make_runner(block_size=1)
    runner.run([1, 2, 3])
    assert runner.cache.match(("a", "model", "full"), prompt) == 0


def test_fewer_agreeing_rows_than_are_worth_a_copy_are_computed_again(make_runner: MakeRunner):
    runner = make_runner(block_size=8, min_copy_tokens=4)
    runner.run(numbers(20))
    assert runner.run([*numbers(11), 99, 98]) == 8
    assert runner.run([*numbers(12), 99, 98]) == 12
    assert runner.cache.stats.copied_tokens == 4


def test_the_child_that_agrees_longest_is_copied(make_runner: MakeRunner):
    runner = make_runner(block_size=8)
    for tail in ([1, 1, 9], [1, 2, 3, 3, 9], [1, 2, 3, 4, 9], [1, 2, 7], [2, 2]):
        runner.run([0, *tail])
    assert runner.run([0, 1, 2, 3, 4, 5, 6]) == 5


def test_an_answer_is_found_by_the_next_turn(make_runner: MakeRunner):
    runner = make_runner()
    blocks = runner.begin(numbers(6))
    tokens = numbers(11)
    for length in range(7, 12):
        blocks.reserve(length)
        runner.compute(blocks, tokens, length - 1, length)
        blocks.publish(tokens[:length], length)
    blocks.finish(tokens, 11)
    assert runner.run([*tokens, 50, 51]) == 11


def test_two_namespaces_share_nothing(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(numbers(12), namespace="a")
    assert runner.run(numbers(12), namespace="b") == 0
    assert runner.run(numbers(12), namespace="b") == 11
    assert len(keys_in(runner)) == 6


def test_the_model_version_and_the_attention_settings_part_scopes_too(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(numbers(12))
    assert runner.cache.match(("a", "model", "full"), numbers(12)) == 11
    assert runner.cache.match(("a", "other", "full"), numbers(12)) == 0
    assert runner.cache.match(("a", "model", "other"), numbers(12)) == 0


def test_equal_blocks_computed_at_the_same_time_are_kept_once(make_runner: MakeRunner):
    runner = make_runner()
    first, second = runner.open(numbers(9)), runner.open(numbers(9))
    for blocks in (first, second):
        blocks.reserve(9)
        runner.compute(blocks, numbers(9), 0, 9)
    first.publish(numbers(9), 9)
    second.publish(numbers(9), 9)
    assert first.table[:2] == second.table[:2]
    assert first.path == second.path
    runner.verify(second, numbers(9), 9)
    runner.cache.check()
    assert (runner.cache.stats.nodes, runner.cache.stats.blocks_private) == (2, 2)


def test_a_full_block_replaces_the_idle_partial_leaf_that_it_begins_with(make_runner: MakeRunner):
    runner = make_runner()
    runner.run([1, 2, 3])
    runner.run([1, 2, 3, 4, 5])
    assert keys_in(runner) == [(1, 2, 3, 4), (5,)]


def test_a_longer_partial_leaf_replaces_a_shorter_one(make_runner: MakeRunner):
    runner = make_runner()
    runner.run([1, 2])
    runner.run([3])
    runner.run([1, 2, 3])
    assert sorted(keys_in(runner)) == [(1, 2, 3), (3,)]


def test_a_partial_leaf_that_a_sibling_begins_with_is_not_kept(make_runner: MakeRunner):
    runner = make_runner()
    runner.run([1, 2, 3, 4])
    runner.run([1, 2])
    assert keys_in(runner) == [(1, 2, 3, 4)]


def test_partial_leaves_that_differ_are_both_kept(make_runner: MakeRunner):
    runner = make_runner()
    runner.run([1, 2, 4])
    runner.run([1, 2, 3])
    assert sorted(keys_in(runner)) == [(1, 2, 3), (1, 2, 4)]


def test_a_partial_leaf_too_short_to_be_copied_is_not_kept(make_runner: MakeRunner):
    runner = make_runner(min_copy_tokens=3)
    runner.run(numbers(6))
    assert keys_in(runner) == [(0, 1, 2, 3)]
    runner.run(numbers(7))
    assert keys_in(runner) == [(0, 1, 2, 3), (4, 5, 6)]


def test_too_many_children_cost_the_least_recently_used_branch(make_runner: MakeRunner):
    runner = make_runner(blocks=64, max_children=2)
    head = numbers(4)
    for tail in (10, 20):
        runner.run(head + numbers(9, start=tail))
    runner.run(head + numbers(9, start=10))
    runner.run(head + numbers(9, start=30))
    assert runner.cache.stats.pruned_branches == 1
    assert runner.run([*head, *numbers(9, start=10)]) == 12
    assert runner.cache.match(("a", "model", "full"), [*head, *numbers(9, start=20)]) == 4


def test_branches_that_run_are_never_pruned(make_runner: MakeRunner):
    runner = make_runner(blocks=64, max_children=1)
    head = numbers(4)
    running = [runner.begin(head + numbers(5, start=tail)) for tail in (10, 20, 30)]
    assert runner.cache.stats.pruned_branches == 0
    for blocks, tail in zip(running, (10, 20, 30), strict=True):
        runner.verify(blocks, head + numbers(5, start=tail), 9)


def test_too_many_roots_cost_the_least_recently_entered(make_runner: MakeRunner):
    runner = make_runner(max_roots=2)
    for namespace in ("a", "b", "a", "c"):
        runner.run(numbers(6), namespace=namespace)
    assert runner.cache.stats.roots == 2
    assert runner.run(numbers(6), namespace="a") == 5


def test_when_all_roots_are_in_use_a_new_scope_works_without_leaving_anything(make_runner: MakeRunner):
    runner = make_runner(max_roots=1)
    runner.begin(numbers(6), namespace="a")
    assert runner.run(numbers(6), namespace="b") == 0
    assert runner.run(numbers(6), namespace="b") == 0
    assert runner.run(numbers(6), namespace="a") == 4


def test_a_root_that_is_read_from_without_publishing_is_in_use(make_runner: MakeRunner):
    runner = make_runner(max_roots=1)
    runner.run(numbers(6), namespace="a")
    reader = runner.begin(numbers(6), namespace="a", write=False)
    runner.run(numbers(6), namespace="b")
    runner.verify(reader, numbers(6), 6)
    reader.release()
    runner.cache.check()


def test_a_node_that_is_read_cannot_be_removed(make_runner: MakeRunner):
    runner = make_runner()
    blocks = runner.begin(numbers(6))
    with pytest.raises(IntegrityError):
        runner.cache.tree.remove(blocks.path[0])


def test_hits_are_counted_once_for_each_request_that_found_a_node(make_runner: MakeRunner):
    runner = make_runner()
    for _ in range(3):
        runner.run(numbers(5))
    hits = {node.tokens: node.hits for node in runner.cache.tree.walk()}
    assert hits[0, 1, 2, 3] == 2


def test_a_tree_deeper_than_the_interpreters_stack_is_walked_and_pruned(make_runner: MakeRunner):
    runner = make_runner(blocks=3000, block_size=1, max_roots=1)
    blocks = runner.open(numbers(2500))
    blocks.reserve(2500)
    blocks.finish(numbers(2500), 2500)
    runner.cache.check()
    runner.run(numbers(3, start=9000))
    assert runner.cache.stats.nodes == 3
    assert (runner.cache.stats.pruned_branches, runner.cache.stats.evicted_blocks) == (1, 2500)
