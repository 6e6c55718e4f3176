"""That the proofs notice: each test breaks one thing by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.kv.node import Scope
from executor.kv.pool import IntegrityError

MakeRunner = Callable[..., Any]


def write_to_the_free(runner: Any, blocks: Any) -> None:
    runner.cache.pool.free(blocks.table[-1])


def count_a_reader_too_many(runner: Any, blocks: Any) -> None:
    blocks.path[0].references += 1


def forget_a_reader(runner: Any, blocks: Any) -> None:
    runner.cache._sequences.discard(blocks)


def point_at_another_block(runner: Any, blocks: Any) -> None:
    blocks.table[0], blocks.table[1] = blocks.table[1], blocks.table[0]


def lose_a_child(runner: Any, blocks: Any) -> None:
    blocks.path[0].children.clear()


def miscount_tokens(runner: Any, blocks: Any) -> None:
    runner.cache.tree.tokens += 1


def leak_a_block(runner: Any, blocks: Any) -> None:
    runner.cache.pool.allocate()


def disorder_siblings(runner: Any, blocks: Any) -> None:
    runner.begin(list(range(50, 60)))
    blocks.path[0].root.children.reverse()


def count_a_pin_too_many(runner: Any, blocks: Any) -> None:
    blocks.path[0].pins += 1


def miscount_the_pinned(runner: Any, blocks: Any) -> None:
    runner.cache.tree.pinned_idle += 1


def forget_a_pin(runner: Any, blocks: Any) -> None:
    runner.cache.pins.pin(Scope("a", "model", "full"), [0, 1, 2, 3], 9.0)
    runner.cache.pins._held.clear()


def lose_a_root(runner: Any, blocks: Any) -> None:
    blocks.path[0].root.anonymous = True


def name_two_nodes_alike(runner: Any, blocks: Any) -> None:
    blocks.path[1].serial = blocks.path[0].serial


def store_twice(runner: Any, blocks: Any) -> None:
    runner.begin(list(range(50, 60)))
    first, second = blocks.path[0].root.children
    second.tokens = (*first.tokens[:3], 99)
    first.tokens = first.tokens[:3]


@pytest.mark.parametrize(
    "damage",
    [
        write_to_the_free,
        count_a_reader_too_many,
        forget_a_reader,
        point_at_another_block,
        lose_a_child,
        miscount_tokens,
        leak_a_block,
        disorder_siblings,
        count_a_pin_too_many,
        miscount_the_pinned,
        forget_a_pin,
        lose_a_root,
        name_two_nodes_alike,
        store_twice,
    ],
)
def test_check_notices(make_runner: MakeRunner, damage: Callable[[Any, Any], None]):
    runner = make_runner()
    blocks = runner.begin(list(range(10)))
    damage(runner, blocks)
    with pytest.raises(IntegrityError):
        runner.cache.check()
