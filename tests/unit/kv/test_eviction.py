"""Who goes, when, and who never does."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.kv.eviction import KVLimits
from executor.kv.node import NOTHING
from executor.kv.pool import OutOfBlocks

MakeRunner = Callable[..., Any]


def prompt(first: int, length: int = 8) -> list[int]:
    return [first, *range(1000, 999 + length)]


def cached(runner: Any, tokens: list[int], namespace: str = "a") -> int:
    return runner.cache.match((namespace, "model", "full"), [*tokens, -1])


def test_the_least_recently_used_goes_first_and_its_beginning_last(make_runner: MakeRunner):
    runner = make_runner(blocks=6)
    runner.run(prompt(1))
    runner.run(prompt(2))
    runner.run(prompt(1))
    runner.begin(prompt(3, 12))
    assert cached(runner, prompt(1)) == 8
    assert cached(runner, prompt(2)) == 4


def test_allocation_evicts_no_more_than_it_needs(make_runner: MakeRunner):
    runner = make_runner(blocks=4)
    runner.run(prompt(1, 16))
    runner.begin(prompt(2, 4))
    assert runner.cache.stats.evicted_blocks == 1
    assert cached(runner, prompt(1, 16)) == 12


def test_nothing_that_runs_is_evicted(make_runner: MakeRunner):
    runner = make_runner(blocks=4)
    blocks = runner.begin(prompt(1, 9))
    other = runner.open(prompt(2, 9))
    with pytest.raises(OutOfBlocks):
        other.reserve(9)
    other.reserve(4)
    runner.cache.reclaim()
    runner.verify(blocks, prompt(1, 9), 9)
    runner.cache.check()


def test_above_the_high_water_mark_reclaim_evicts_down_to_the_low_one(make_runner: MakeRunner):
    runner = make_runner(blocks=20, high_water=0.8, low_water=0.5)
    runner.run(prompt(1, 64))
    runner.cache.reclaim()
    assert runner.cache.stats.blocks_free == 4
    runner.run(prompt(2, 4))
    runner.cache.reclaim()
    assert runner.cache.stats.blocks_free == 10
    assert runner.cache.stats.evicted_blocks == 7


def test_reclaim_keeps_within_the_limits_of_nodes_and_tokens(make_runner: MakeRunner):
    runner = make_runner(max_nodes=5)
    runner.run(prompt(1, 28))
    runner.cache.reclaim()
    assert runner.cache.stats.nodes == 5
    runner = make_runner(max_tokens=10)
    runner.run(prompt(1, 27))
    runner.cache.reclaim()
    assert runner.cache.stats.tokens == 8


def test_limits_that_running_sequences_exceed_are_held_when_they_end(make_runner: MakeRunner):
    runner = make_runner(max_nodes=2, max_tokens=8)
    blocks = runner.begin(prompt(1, 16))
    runner.cache.reclaim()
    assert runner.cache.stats.nodes == 4
    blocks.finish(prompt(1, 16), 16)
    runner.cache.reclaim()
    assert runner.cache.stats.nodes == 2


def test_a_namespace_over_its_share_loses_its_own_leaves_first(make_runner: MakeRunner):
    runner = make_runner(blocks=10, namespace_share=0.5)
    runner.run(prompt(1, 8), namespace="small")
    runner.run(prompt(2, 32), namespace="big")
    runner.begin(prompt(3, 12), namespace="third")
    assert cached(runner, prompt(1, 8), "small") == 8
    assert cached(runner, prompt(2, 32), "big") == 20


def test_a_namespace_within_its_share_competes_by_use_alone(make_runner: MakeRunner):
    runner = make_runner(blocks=10, namespace_share=0.8)
    runner.run(prompt(1, 8), namespace="small")
    runner.run(prompt(2, 32), namespace="big")
    runner.begin(prompt(3, 8), namespace="third")
    assert cached(runner, prompt(1, 8), "small") == 0
    assert cached(runner, prompt(2, 32), "big") == 32


def test_a_namespace_may_fill_the_pool_while_nobody_else_wants_room(make_runner: MakeRunner):
    runner = make_runner(blocks=10, namespace_share=0.5, high_water=1.0)
    runner.run(prompt(1, 40), namespace="only")
    runner.cache.reclaim()
    assert runner.cache.stats.nodes == 10


def test_by_use_counts_what_many_found_outlives_what_was_used_last(make_runner: MakeRunner):
    for eviction, survives in (("lru", 0), ("lfu_aged", 7)):
        runner = make_runner(blocks=4, eviction=eviction)
        for _ in range(5):
            runner.run(prompt(1))
        runner.run(prompt(2))
        runner.begin(prompt(3))
        assert runner.cache.match(("a", "model", "full"), prompt(1)) == survives


def test_by_use_counts_old_fame_fades(make_runner: MakeRunner):
    runner = make_runner(blocks=4, eviction="lfu_aged")
    for _ in range(3):
        runner.run(prompt(1))
    for first in range(10, 40):
        runner.run(prompt(first))
        runner.run(prompt(first))
    assert cached(runner, prompt(1)) == 0


def test_by_use_counts_old_fame_fades_before_prompts_that_come_once_too(make_runner: MakeRunner):
    runner = make_runner(blocks=4, eviction="lfu_aged")
    for _ in range(3):
        runner.run(prompt(1))
    for first in range(10, 40):
        runner.run(prompt(first))
    assert cached(runner, prompt(1)) == 0


def test_many_touches_do_not_pile_up(make_runner: MakeRunner):
    runner = make_runner(blocks=200, namespace_share=0.9)
    for turn in range(600):
        runner.run(prompt(turn % 5, 6))
    idle = runner.cache._evictor._idle
    assert len(idle._all._entries) <= 128
    assert len(idle._heaps["a"]._entries) <= 128


def test_namespaces_that_came_once_are_forgotten(make_runner: MakeRunner):
    runner = make_runner(blocks=8, namespace_share=0.9)
    for turn in range(500):
        runner.run(prompt(1, 4), namespace=f"tenant {turn}")
    assert len(runner.cache._evictor._idle._heaps) <= 64
    assert runner.cache.stats.roots == 8


def test_admission_counts_what_is_free_and_what_may_be_evicted(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(prompt(1, 16))
    assert runner.cache.available_blocks == 8
    assert runner.cache.can_admit(NOTHING, 32)
    assert not runner.cache.can_admit(NOTHING, 33)
    runner.begin(prompt(2, 12))
    assert runner.cache.can_admit(NOTHING, 20)
    assert not runner.cache.can_admit(NOTHING, 21)


def test_admission_counts_shared_blocks_of_running_sequences_once(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.begin(prompt(1, 24))
    wanted = [*prompt(1, 24), 7]
    assert runner.cache.can_admit(runner.find(wanted), 32)
    assert not runner.cache.can_admit(runner.find(wanted), 33)
    assert not runner.cache.can_admit(NOTHING, 32)
    blocks = runner.open(wanted)
    blocks.reserve(32)


def test_idle_blocks_that_a_request_finds_are_not_counted_twice(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(prompt(1, 24))
    wanted = [*prompt(1, 24), 7]
    assert runner.cache.can_admit(runner.find(wanted), 32)
    assert not runner.cache.can_admit(runner.find(wanted), 33)
    blocks = runner.open(wanted)
    blocks.reserve(32)
    with pytest.raises(OutOfBlocks):
        blocks.reserve(33)


@pytest.mark.parametrize(
    "wrong",
    [
        {"low_water": 0.95},
        {"high_water": 1.1},
        {"low_water": 0.0},
        {"namespace_share": 0.0},
        {"max_pinned": 1.0},
        {"max_pinned": -0.1},
        {"max_children": 0},
        {"min_copy_tokens": 0},
    ],
)
def test_limits_that_contradict_themselves_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KVLimits(**wrong)  # type: ignore[arg-type]
