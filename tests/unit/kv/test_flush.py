"""A flush: what it frees, whom it leaves alone, and that nothing older than it is found."""

from collections.abc import Callable
from typing import Any

import pytest

from executor.kv.node import NOTHING, Scope
from executor.kv.pins import UnknownPinError

MakeRunner = Callable[..., Any]
SCOPE = Scope("a", "model", "full")
TOKENS = list(range(10))


def flush(runner: Any, namespace: str | None = None) -> int:
    freed: int = runner.cache.flush(namespace)
    runner.cache.check()
    return freed


def test_at_rest_everything_goes(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    runner.run([*TOKENS[:6], 90, 91, 92])
    runner.run(TOKENS, namespace="b")
    assert flush(runner) == 8
    stats = runner.cache.stats
    assert (stats.nodes, stats.roots, stats.blocks_free) == (0, 0, stats.blocks_total)
    assert flush(runner) == 0


def test_a_namespace_goes_alone(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS, namespace="a")
    runner.run(TOKENS, namespace="b")
    assert flush(runner, "a") == 3
    assert runner.run(TOKENS, namespace="b") == 9
    assert runner.run(TOKENS, namespace="a") == 0


def test_all_scopes_of_a_namespace_go(make_runner: MakeRunner):
    runner = make_runner()
    for version in ("old", "new"):
        blocks = runner.cache.open(Scope("a", version, "full"), NOTHING)
        blocks.reserve(10)
        blocks.finish(TOKENS, 10)
    assert flush(runner, "a") == 6


def test_what_is_read_stays_until_it_is_released_and_is_found_by_nobody(make_runner: MakeRunner):
    runner = make_runner()
    runner.run([*TOKENS[:8], 90, 91, 92, 93])
    running = runner.begin(TOKENS)
    assert flush(runner) == 1
    runner.verify(running, TOKENS, 10)
    assert runner.cache.match(SCOPE, TOKENS) == 0
    running.finish(TOKENS, 10)
    runner.cache.check()
    assert (runner.cache.stats.nodes, runner.cache.stats.roots) == (0, 0)


def test_what_began_before_publishes_nothing_that_others_find(make_runner: MakeRunner):
    runner = make_runner()
    running = runner.begin(TOKENS)
    flush(runner)
    answer = [*TOKENS, *range(50, 58)]
    runner.extend(running, answer, 10)
    assert not running.findable
    assert runner.run(answer) == 0
    running.finish(answer, 18)
    assert runner.cache.covers(SCOPE, answer) == 18
    assert runner.cache.stats.nodes == 5


def test_what_began_without_writing_reads_on(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    running = runner.begin([*TOKENS, 90, 91, 92], write=False)
    flush(runner)
    runner.verify(running, [*TOKENS, 90, 91, 92], 13)
    running.release()
    runner.cache.check()
    assert runner.cache.stats.blocks_free == runner.cache.stats.blocks_total


def test_samples_of_what_began_before_share_on(make_runner: MakeRunner):
    runner = make_runner()
    first = runner.begin(TOKENS)
    second = runner.fork(first, TOKENS, 10)
    flush(runner)
    answer = [*TOKENS, 50, 51]
    for blocks in (first, second, runner.fork(first, TOKENS, 10)):
        runner.extend(blocks, answer, 10)
        assert blocks.table == first.table


def test_what_begins_after_it_is_cached_as_ever(make_runner: MakeRunner):
    runner = make_runner()
    before = runner.begin(TOKENS)
    flush(runner)
    after = runner.begin(TOKENS)
    assert after.table[0] != before.table[0]
    before.finish(TOKENS, 10)
    after.finish(TOKENS, 10)
    assert runner.run(TOKENS) == 9


def test_pins_go_too(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS, namespace="a")
    runner.run(TOKENS, namespace="b")
    gone, kept = (runner.cache.pins.pin(Scope(name, "model", "full"), TOKENS, 9.0) for name in "ab")
    reader = runner.begin(TOKENS)
    assert flush(runner, "a") == 1
    assert (runner.cache.stats.blocks_pinned, len(runner.cache.pins)) == (3, 1)
    with pytest.raises(UnknownPinError):
        runner.cache.pins.unpin(gone.id)
    runner.cache.pins.unpin(kept.id)
    reader.release()
    runner.cache.check()


def test_it_is_no_eviction(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(TOKENS)
    flush(runner)
    assert (runner.cache.stats.evicted_blocks, runner.cache.stats.pruned_branches) == (0, 0)


def test_a_tree_deeper_than_the_interpreters_stack_is_flushed(make_runner: MakeRunner):
    runner = make_runner(blocks=3000, block_size=1)
    tokens = list(range(2500))
    blocks = runner.open(tokens)
    blocks.reserve(2500)
    blocks.finish(tokens, 2500)
    assert flush(runner) == 2500
