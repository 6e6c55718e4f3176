"""Pins: what they keep, for how long, and how much they may."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.kv.node import Scope
from executor.kv.pins import PinLimitError, UnknownPinError
from executor.kv.pool import IntegrityError, OutOfBlocks

MakeRunner = Callable[..., Any]
SCOPE = Scope("a", "model", "full")
TOKENS = list(range(10))


def pin(runner: Any, tokens: list[int], *, until: float = 100.0, namespace: str = "a") -> Any:
    made = runner.cache.pins.pin(Scope(namespace, "model", "full"), tokens, until)
    runner.cache.check()
    return made


def press(runner: Any) -> None:
    """Asks for all that may be had."""
    blocks = runner.open([-1] * runner.cache.capacity, namespace="pressure")
    blocks.reserve(runner.cache.available_blocks * runner.cache.block_size)
    blocks.release()
    runner.cache.check()


def test_what_is_pinned_outlives_what_was_used_later(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(TOKENS)
    assert pin(runner, TOKENS).blocks == 3
    runner.run(list(range(50, 60)))
    press(runner)
    assert runner.cache.covers(SCOPE, TOKENS) == 10
    assert runner.cache.stats.nodes == 3


def test_what_is_pinned_stays_when_its_last_reader_went(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(TOKENS)
    pin(runner, TOKENS)
    assert runner.run(TOKENS) == 9
    runner.begin([*TOKENS[:8], 90]).release()
    runner.run(list(range(50, 60)))
    press(runner)
    assert runner.cache.covers(SCOPE, TOKENS) == 10


def test_the_beginning_alone_is_pinned_and_its_continuations_may_go(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(list(range(20)))
    pin(runner, TOKENS[:8])
    press(runner)
    assert runner.cache.covers(SCOPE, list(range(20))) == 8


def test_a_pin_that_ends_inside_a_block_holds_it(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(list(range(20)))
    assert pin(runner, TOKENS).blocks == 3
    press(runner)
    assert runner.cache.covers(SCOPE, list(range(20))) == 12


def test_a_pinned_partial_leaf_grows_and_stays_pinned(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(TOKENS[:6])
    pin(runner, TOKENS[:6])
    runner.run(list(range(20)))
    assert [node.tokens for node in runner.cache.tree.walk()][1] == (4, 5, 6, 7)
    press(runner)
    assert runner.cache.covers(SCOPE, list(range(20))) == 8


def test_what_the_tree_has_not_is_not_pinned(make_runner: MakeRunner):
    runner = make_runner()
    nothing = pin(runner, TOKENS)
    assert nothing.blocks == 0
    runner.run(TOKENS, namespace="b")
    assert pin(runner, TOKENS).blocks == 0
    runner.cache.pins.unpin(nothing.id)


def test_a_pin_ends_by_name_once(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(TOKENS)
    made = pin(runner, TOKENS)
    runner.cache.pins.unpin(made.id)
    runner.cache.check()
    with pytest.raises(UnknownPinError, match=made.id):
        runner.cache.pins.unpin(made.id)
    press(runner)
    assert runner.cache.stats.nodes == 0


def test_a_pin_ends_by_time(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    pins = runner.cache.pins
    runner.run(TOKENS)
    pin(runner, TOKENS, until=5.0)
    pin(runner, TOKENS[:4], until=7.0)
    assert (pins.expire(4.9), runner.cache.stats.blocks_pinned) == (0, 3)
    assert (pins.expire(5.0), runner.cache.stats.blocks_pinned) == (1, 1)
    assert (pins.expire(6.9), runner.cache.stats.blocks_pinned) == (0, 1)
    assert (pins.expire(70.0), runner.cache.stats.blocks_pinned, len(pins)) == (1, 0, 0)
    press(runner)
    assert runner.cache.stats.nodes == 0


def test_a_pin_that_was_ended_early_does_not_hide_the_time_of_another(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    pins = runner.cache.pins
    assert pins.next_end is None
    early, late = pin(runner, TOKENS, until=1.0), pin(runner, TOKENS, until=2.0)
    pins.unpin(early.id)
    assert pins.expire(1.5) == 0
    assert pins.next_end == 2.0
    pins.unpin(late.id)
    assert pins.next_end is None
    pin(runner, TOKENS, until=3.0)
    assert pins.expire(3.0) == 1
    assert pins.next_end is None


def test_blocks_under_several_pins_count_once_and_stay_until_the_last_ends(make_runner: MakeRunner):
    runner = make_runner(blocks=10, max_pinned=0.3)
    runner.run(TOKENS)
    first, second = pin(runner, TOKENS), pin(runner, TOKENS[:8])
    assert runner.cache.stats.blocks_pinned == 3
    runner.cache.pins.unpin(first.id)
    assert runner.cache.stats.blocks_pinned == 2
    press(runner)
    assert runner.cache.covers(SCOPE, TOKENS) == 8
    runner.cache.pins.unpin(second.id)
    assert runner.cache.stats.blocks_pinned == 0


def test_pins_hold_no_more_than_their_share(make_runner: MakeRunner):
    runner = make_runner(blocks=10, max_pinned=0.5)
    runner.run(TOKENS)
    runner.run(list(range(50, 62)))
    pin(runner, TOKENS)
    before = runner.cache.stats
    with pytest.raises(PinLimitError, match="3 more blocks would be pinned; 3 are, and 5 may be") as refused:
        pin(runner, list(range(50, 62)))
    assert (refused.value.wanted, refused.value.pinned, refused.value.limit) == (3, 3, 5)
    assert (runner.cache.stats, len(runner.cache.pins)) == (before, 1)
    assert pin(runner, list(range(50, 58))).blocks == 2


def test_counts_tell_pinned_blocks_that_are_read_from_those_that_rest(make_runner: MakeRunner):
    runner = make_runner(blocks=12)

    def counts() -> tuple[int, int]:
        stats = runner.cache.stats
        parts = stats.blocks_free + stats.blocks_active + stats.blocks_cached + stats.blocks_pinned_idle
        assert parts == stats.blocks_total
        return stats.blocks_pinned, stats.blocks_pinned_idle

    runner.run(TOKENS)
    runner.run([70, 71, 72, 73])
    made = pin(runner, TOKENS)
    assert counts() == (3, 3)
    reader = runner.begin(TOKENS[:8])
    assert counts() == (3, 1)
    reader.finish(TOKENS[:8], 8)
    assert counts() == (3, 3)
    runner.cache.pins.unpin(made.id)
    assert counts() == (0, 0)


def test_admission_and_allocation_leave_pinned_blocks_out(make_runner: MakeRunner):
    runner = make_runner(blocks=8)
    runner.run(TOKENS)
    pin(runner, TOKENS)
    assert runner.cache.available_blocks == 5
    found = runner.find([*TOKENS[:8], 90])
    assert runner.cache.can_admit(found, 7 * 4)
    assert not runner.cache.can_admit(found, 8 * 4)
    other = runner.open([90, 91], namespace="b")
    with pytest.raises(OutOfBlocks):
        other.reserve(6 * 4)
    other.reserve(5 * 4)


def test_branches_and_roots_that_are_pinned_are_not_pruned(make_runner: MakeRunner):
    runner = make_runner(max_children=1, max_roots=1)
    runner.run(TOKENS)
    pin(runner, TOKENS)
    runner.run([*TOKENS[:4], 90, 91, 92, 93])
    assert runner.cache.covers(SCOPE, TOKENS) == 10
    runner.run(TOKENS, namespace="b")
    assert runner.cache.covers(SCOPE, TOKENS) == 10


def test_a_pinned_node_cannot_be_removed(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    pin(runner, TOKENS)
    with pytest.raises(IntegrityError, match="held"):
        runner.cache.tree.remove(next(runner.cache.tree.walk()))


def test_a_pin_is_a_use_and_its_end_is_none(make_runner: MakeRunner):
    runner = make_runner(blocks=4)
    runner.run([1, 2, 3, 4])
    runner.run([5, 6, 7, 8])
    made = pin(runner, [1, 2, 3, 4])
    runner.run([9, 10, 11, 12])
    runner.cache.pins.unpin(made.id)
    runner.begin([20, 21, 22, 23, 24])
    assert runner.cache.covers(SCOPE, [1, 2, 3, 4]) == 4
    runner.begin([30])
    assert runner.cache.covers(SCOPE, [1, 2, 3, 4]) == 0
    assert runner.cache.covers(SCOPE, [9, 10, 11, 12]) == 4


def test_pinning_again_and_again_does_not_pile_up(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    for _ in range(300):
        runner.cache.pins.unpin(pin(runner, TOKENS).id)
    assert len(runner.cache._evictor._idle._all._entries) <= 64


def test_covers_may_find_the_last_token_too(make_runner: MakeRunner):
    runner = make_runner(min_copy_tokens=2)
    runner.run(TOKENS)
    assert [runner.cache.covers(SCOPE, TOKENS[:n]) for n in (0, 1, 4, 5, 8, 10)] == [0, 0, 4, 4, 8, 10]
    assert runner.cache.match(SCOPE, TOKENS[:8]) == 7
    assert runner.cache.covers(Scope("b", "model", "full"), TOKENS) == 0


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_that_ran_is_covered_as_far_as_it_can_be_kept(make_runner: MakeRunner, length: int):
    for limits in ({}, {"min_copy_tokens": 3}, {"min_cached_tokens": 6}, {"prefix_cache": False}):
        runner = make_runner(**limits)
        tokens = list(range(length))
        runner.run(tokens)
        assert runner.cache.covers(SCOPE, tokens) == runner.cache.keepable(length)


def test_whether_a_prefix_could_be_pinned_is_known_before_it_is_there(make_runner: MakeRunner):
    runner = make_runner(blocks=10, max_pinned=0.5)
    runner.cache.pins.check(SCOPE, range(20))
    with pytest.raises(PinLimitError, match="6 more blocks would be pinned; 0 are, and 5 may be"):
        runner.cache.pins.check(SCOPE, range(21))
    runner.run(TOKENS)
    pin(runner, TOKENS)
    runner.cache.pins.check(SCOPE, [*TOKENS[:8], *range(50, 58)])
    with pytest.raises(PinLimitError):
        runner.cache.pins.check(SCOPE, range(50, 62))
    # A last block that only begins alike is another one.
    with pytest.raises(PinLimitError):
        runner.cache.pins.check(SCOPE, [*TOKENS[:9], *range(80, 91)])
    runner.cache.pins.check(SCOPE, [*TOKENS, *range(80, 90)])
