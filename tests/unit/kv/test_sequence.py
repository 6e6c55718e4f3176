"""One sequence's life: what it shares, what it owns, and that both are given back once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.kv.pool import OutOfBlocks

MakeRunner = Callable[..., Any]
TOKENS = list(range(10))


def test_its_first_blocks_are_the_trees_and_the_others_its_own(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    blocks = runner.open([*TOKENS[:8], 90, 91])
    blocks.reserve(10)
    assert (blocks.cached_tokens, blocks.copied_tokens, blocks.shared) == (8, 0, 2)
    assert blocks.table[:2] == [node.block for node in blocks.path]
    assert len(blocks.table) == 3
    assert runner.cache.stats.blocks_private == 1


def test_leaving_a_block_half_way_copies_its_rows_and_keeps_it_as_it_is(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    blocks = runner.begin([*TOKENS[:6], 90, 91, 92])
    assert (blocks.cached_tokens, blocks.copied_tokens) == (6, 2)
    other = runner.open(TOKENS)
    runner.verify(other, TOKENS, 9)


def test_a_fork_of_a_running_sequence_shares_what_it_published(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(TOKENS)
    second = runner.begin([*TOKENS[:8], 70, 71])
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    runner.verify(first, TOKENS, 10)


def test_nothing_is_found_before_the_step_that_computes_it_succeeded(make_runner: MakeRunner):
    runner = make_runner()
    blocks = runner.open(TOKENS)
    blocks.reserve(10)
    runner.compute(blocks, TOKENS, 0, 10)
    assert runner.run(TOKENS) == 0
    blocks.publish(TOKENS, 10)
    runner.verify(blocks, TOKENS, 10)


def test_a_failed_step_leaves_nothing_of_its_own_behind(make_runner: MakeRunner):
    runner = make_runner()
    blocks = runner.open(TOKENS)
    blocks.reserve(10)
    blocks.publish(TOKENS, 4)
    blocks.release()
    runner.cache.check()
    assert [node.tokens for node in runner.cache.tree.walk()] == [(0, 1, 2, 3)]
    assert runner.cache.stats.blocks_private == 0


def test_a_cancelled_sequence_keeps_what_it_computed_with_its_partial_tail(make_runner: MakeRunner):
    runner = make_runner()
    blocks = runner.open(TOKENS)
    blocks.reserve(10)
    runner.compute(blocks, TOKENS, 0, 7)
    blocks.finish(TOKENS, 7)
    assert runner.run(TOKENS) == 7


@pytest.mark.parametrize("last", ["finish", "release"])
def test_a_second_end_does_nothing(make_runner: MakeRunner, last: str):
    runner = make_runner()
    blocks, other = runner.begin(TOKENS), runner.begin(TOKENS)
    blocks.finish(TOKENS, 10)
    free = runner.cache.pool.free_blocks
    if last == "finish":
        blocks.finish(TOKENS, 10)
    else:
        getattr(blocks, last)()
    assert runner.cache.pool.free_blocks == free
    runner.cache.check()
    runner.verify(other, TOKENS, 10)


def test_a_released_sequence_reserves_and_publishes_nothing(make_runner: MakeRunner):
    blocks = make_runner().begin(TOKENS)
    blocks.release()
    assert not blocks.is_open
    with pytest.raises(ValueError, match="released"):
        blocks.reserve(1)
    with pytest.raises(ValueError, match="released"):
        blocks.publish(TOKENS, 10)


def test_what_has_no_slots_or_no_tokens_is_not_published(make_runner: MakeRunner):
    blocks = make_runner().open(TOKENS)
    blocks.reserve(4)
    with pytest.raises(ValueError, match="slots for 4"):
        blocks.publish(TOKENS, 5)
    with pytest.raises(ValueError, match="of 3"):
        blocks.publish(TOKENS[:3], 4)


def test_reserving_more_than_there_is_changes_nothing(make_runner: MakeRunner):
    runner = make_runner(blocks=4)
    runner.run(TOKENS[:4])
    blocks = runner.begin([50, 51, 52, 53])
    before = list(blocks.table)
    with pytest.raises(OutOfBlocks):
        blocks.reserve(20)
    assert blocks.table == before
    assert runner.cache.stats.evicted_blocks == 0
    runner.cache.check()


def test_without_room_for_a_copy_it_does_without(make_runner: MakeRunner):
    runner = make_runner(blocks=3)
    runner.run(TOKENS[:3])
    runner.begin([60, 61, 62, 63, 64, 65])
    blocks = runner.open([0, 1, 90])
    assert (blocks.cached_tokens, blocks.copied_tokens) == (0, 0)
    blocks.reserve(3)
    assert runner.cache.stats.evicted_blocks == 1


def test_a_copy_that_fails_holds_nothing(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch):
    runner = make_runner()
    runner.run(TOKENS)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner.cache.pool, "copy_rows", fail)
    with pytest.raises(torch.OutOfMemoryError):
        runner.open(TOKENS)
    runner.cache.check()
    assert runner.cache.stats.blocks_active == 0


def test_without_read_nothing_is_found_but_what_is_there_is_kept_once(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    assert runner.run(TOKENS, read=False) == 0
    assert runner.cache.stats.nodes == 3


def test_without_write_what_it_publishes_goes_when_it_ends(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS[:5])
    blocks = runner.begin(TOKENS, write=False)
    assert (blocks.cached_tokens, blocks.shared) == (5, 2)
    assert runner.run(TOKENS, write=False) == 5
    blocks.finish(TOKENS, 10)
    runner.cache.check()
    assert sorted(node.tokens for node in runner.cache.tree.walk()) == [(0, 1, 2, 3), (4,)]


def test_prompts_below_the_least_cached_length_are_not_published(make_runner: MakeRunner):
    runner = make_runner(min_cached_tokens=8)
    runner.run(TOKENS[:7])
    assert runner.cache.stats.nodes == 0
    runner.run(TOKENS[:8])
    assert runner.run(TOKENS) == 8


def test_a_cache_that_is_switched_off_finds_and_leaves_nothing(make_runner: MakeRunner):
    runner = make_runner(prefix_cache=False)
    runner.run(TOKENS)
    assert runner.run(TOKENS) == 0
    assert runner.cache.match(("a", "model", "full"), TOKENS) == 0
    assert runner.cache.stats.blocks_free == runner.cache.stats.blocks_total


def test_a_sequence_that_grows_token_by_token_stays_contiguous(make_runner: MakeRunner):
    runner = make_runner(blocks=60)
    one, two = list(range(60)), list(range(100, 160))
    first, second = runner.begin(one[:5]), runner.begin(two[:5])
    for length in range(6, 61):
        for blocks, tokens in ((first, one), (second, two)):
            blocks.reserve(length)
            blocks.publish(tokens, length)
    assert all(b.table == list(range(b.table[0], b.table[0] + 15)) for b in (first, second))
