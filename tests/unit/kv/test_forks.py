"""Forks: what samples of one prompt share, what each has alone, and that nobody writes what another reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.kv.node import Scope
from executor.kv.pool import OutOfBlocks

MakeRunner = Callable[..., Any]
PROMPT = list(range(10))


@pytest.mark.parametrize("write", [True, False])
def test_samples_hold_one_prompt_and_a_tail_each(make_runner: MakeRunner, write: bool):
    runner = make_runner()
    first = runner.begin(PROMPT, write=write)
    samples = [first, *(runner.fork(first, PROMPT, 10) for _ in range(3))]
    assert runner.cache.stats.blocks_active == 2 + 4
    for index, blocks in enumerate(samples):
        runner.extend(blocks, [*PROMPT, 100 + index], 10)
    for index, blocks in enumerate(samples):
        runner.verify(blocks, [*PROMPT, 100 + index], 11)
    assert runner.cache.stats.blocks_active == 2 + 4


def test_samples_that_choose_alike_share_on(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(PROMPT, write=False)
    second = runner.fork(first, PROMPT, 10)
    answer = [*PROMPT, 50, 51, 52]
    runner.extend(first, answer, 10)
    runner.extend(second, answer, 10)
    assert first.path == second.path
    assert (len(first.path), runner.cache.stats.nodes) == (3, 3)


def test_a_fork_on_a_block_boundary_takes_no_block(make_runner: MakeRunner):
    runner = make_runner(blocks=2)
    first = runner.begin(PROMPT[:8])
    second = runner.fork(first, PROMPT[:8], 8)
    assert (second.table, second.shared) == (first.table, 2)


def test_a_fork_publishes_what_was_computed_so_that_it_is_shared(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.open(PROMPT)
    first.reserve(10)
    runner.compute(first, PROMPT, 0, 10)
    second = runner.fork(first, PROMPT, 10)
    assert (first.shared, second.shared, runner.cache.stats.blocks_private) == (2, 2, 2)


def test_a_fork_of_what_waits_for_its_first_step_shares_what_the_tree_has(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(PROMPT)
    first = runner.open([*PROMPT, 90])
    second = runner.fork(first, [*PROMPT, 90], first.cached_tokens)
    assert (second.shared, second.reserved) == (2, 12)


def test_a_fork_is_no_hit_and_copies_nothing_that_counts(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(PROMPT)
    second = runner.fork(first, PROMPT, 10)
    assert (second.cached_tokens, second.copied_tokens) == (0, 0)
    assert runner.cache.stats.copied_tokens == 0
    assert [node.hits for node in first.path] == [0, 0]


def test_each_ends_alone_and_the_others_read_on(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(PROMPT, write=False)
    second, third = runner.fork(first, PROMPT, 10), runner.fork(first, PROMPT, 10)
    first.finish(PROMPT, 10)
    second.release()
    runner.cache.check()
    fourth = runner.fork(third, PROMPT, 10)
    third.release()
    runner.verify(fourth, PROMPT, 10)
    fourth.finish(PROMPT, 10)
    stats = runner.cache.stats
    assert (stats.nodes, stats.roots, stats.blocks_free) == (0, 0, stats.blocks_total)


def test_what_a_fork_answered_is_found_by_the_next_turn(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(PROMPT)
    second = runner.fork(first, PROMPT, 10)
    answers = [[*PROMPT, *range(start, start + 5)] for start in (50, 60)]
    for blocks, answer in zip((first, second), answers, strict=True):
        runner.extend(blocks, answer, 10)
        blocks.finish(answer, 15)
    assert [runner.cache.match(Scope("a", "model", "full"), [*answer, -1]) for answer in answers] == [15, 15]


@pytest.mark.parametrize("write", [True, False])
def test_without_a_block_there_is_no_fork_and_nothing_changed(make_runner: MakeRunner, write: bool):
    runner = make_runner(blocks=3)
    first = runner.begin(PROMPT, write=write)
    table, before = list(first.table), runner.cache.stats
    with pytest.raises(OutOfBlocks):
        first.fork(PROMPT, 10)
    runner.cache.check()
    assert (first.table, runner.cache.stats) == (table, before)


def test_a_fork_evicts_what_it_needs(make_runner: MakeRunner):
    runner = make_runner(blocks=4)
    runner.run([70, 71, 72, 73])
    first = runner.begin(PROMPT)
    runner.fork(first, PROMPT, 10)
    assert runner.cache.stats.evicted_blocks == 1


def test_a_fork_whose_copy_fails_holds_nothing(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch):
    runner = make_runner()
    first = runner.begin(PROMPT)
    before = runner.cache.stats

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner.cache.pool, "copy_rows", fail)
    with pytest.raises(torch.OutOfMemoryError):
        first.fork(PROMPT, 10)
    runner.cache.check()
    assert runner.cache.stats == before


def test_what_was_released_or_never_computed_is_not_forked(make_runner: MakeRunner):
    first = make_runner().begin(PROMPT)
    with pytest.raises(ValueError, match="slots for 12"):
        first.fork([*PROMPT, 1, 2, 3], 13)
    first.release()
    with pytest.raises(ValueError, match="released"):
        first.fork(PROMPT, 10)


def test_it_says_whether_others_find_what_it_publishes(make_runner: MakeRunner):
    runner = make_runner(min_cached_tokens=4)
    assert runner.begin(PROMPT).findable
    assert not runner.begin(PROMPT, write=False).findable
    assert not runner.begin(PROMPT[:3]).findable
