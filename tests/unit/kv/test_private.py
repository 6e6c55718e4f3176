"""What a request keeps to itself: its own samples find it, nobody else does, and it goes with the request."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from executor.kv.node import NOTHING, Scope
from executor.kv.private import PrivateRoots

MakeRunner = Callable[..., Any]
SCOPE = Scope("a", "model", "full")
PROMPT = list(range(14))


def begin(runner: Any, own: PrivateRoots, tokens: Sequence[int]) -> Any:
    """A sample of the request, as far as the end of these tokens."""
    found = own.extend(runner.find(tokens), tokens, len(tokens) - 1)
    blocks = runner.enter(tokens, found, own)
    runner.extend(blocks, tokens, blocks.cached_tokens)
    return blocks


def run(runner: Any, own: PrivateRoots, tokens: Sequence[int]) -> int:
    """A sample from beginning to end. Returns how many tokens it found."""
    blocks = begin(runner, own, tokens)
    found = blocks.cached_tokens
    blocks.finish(tokens, len(tokens))
    runner.cache.check()
    return int(found)


def test_a_later_sample_finds_all_that_an_earlier_one_left(make_runner: MakeRunner):
    runner = make_runner()
    own = runner.cache.private_roots(SCOPE)
    assert run(runner, own, PROMPT) == 0
    assert run(runner, own, PROMPT) == 13
    assert runner.cache.match(SCOPE, [*PROMPT, 99]) == 0


def test_another_request_finds_nothing_of_it(make_runner: MakeRunner):
    runner = make_runner()
    one, other = runner.cache.private_roots(SCOPE), runner.cache.private_roots(SCOPE)
    run(runner, one, PROMPT)
    assert run(runner, other, PROMPT) == 0


def test_when_the_request_leaves_all_goes_that_nobody_reads(make_runner: MakeRunner):
    runner = make_runner()
    own = runner.cache.private_roots(SCOPE)
    run(runner, own, PROMPT)
    running = begin(runner, own, PROMPT[:9])
    own.leave()
    own.leave()
    runner.cache.check()
    assert runner.cache.stats.nodes > 0
    running.finish(PROMPT[:9], 9)
    runner.cache.check()
    assert (runner.cache.stats.nodes, runner.cache.stats.roots) == (0, 0)


def test_it_goes_on_from_what_others_published(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(PROMPT[:8])
    own = runner.cache.private_roots(SCOPE)
    assert run(runner, own, PROMPT) == 8
    assert run(runner, own, PROMPT) == 13
    runner.run(PROMPT[:13])
    assert run(runner, own, [*PROMPT, 99]) == 14


def test_what_others_published_since_is_found_where_it_is_longer(make_runner: MakeRunner):
    runner = make_runner()
    own = runner.cache.private_roots(SCOPE)
    run(runner, own, PROMPT[:5])
    runner.run(PROMPT)
    assert run(runner, own, [*PROMPT, 99]) == 14
    assert run(runner, own, [*PROMPT, 99, 98]) == 15


def test_without_the_part_that_it_hangs_on_it_is_not_found(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(PROMPT[:8])
    own = runner.cache.private_roots(SCOPE)
    assert run(runner, own, PROMPT) == 8
    runner.cache.flush(None)
    assert run(runner, own, PROMPT) == 0
    assert run(runner, own, PROMPT) == 13
    own.leave()
    runner.cache.check()
    assert runner.cache.stats.nodes == 0


@pytest.mark.parametrize("eviction", ["lru", "lfu_aged"])
def test_it_is_evicted_like_anything_else_when_there_is_no_room(make_runner: MakeRunner, eviction: str):
    runner = make_runner(blocks=8, eviction=eviction)
    own = runner.cache.private_roots(SCOPE)
    run(runner, own, PROMPT)
    other = runner.open([90], namespace="b")
    other.reserve(8 * 4)
    runner.cache.check()
    assert runner.cache.stats.nodes == 0
    other.release()
    assert run(runner, own, PROMPT) == 0


def test_what_was_found_before_is_looked_up_anew_only_where_it_went(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(PROMPT)
    found = runner.find(PROMPT)
    assert runner.cache.find(SCOPE, PROMPT, 13, found) == found
    leaf = found.path[-1]
    for child in list(leaf.children):
        runner.cache.tree.remove(child)
    runner.cache.tree.remove(leaf)
    assert runner.cache.find(SCOPE, PROMPT, 13, found).length == leaf.start
    runner.run([*PROMPT, 77, 78])
    assert runner.cache.find(SCOPE, PROMPT, 13, found) == runner.find(PROMPT)
    runner.cache.flush(None)
    assert runner.cache.find(SCOPE, PROMPT, 13, found) == NOTHING


def test_samples_that_parted_where_others_had_gone_before_share_nothing_behind_that(make_runner: MakeRunner):
    runner = make_runner()
    one, other = [*PROMPT[:4], 50, 51, 52, 53], [*PROMPT[:4], 60, 61, 62, 63]
    runner.run(one)
    runner.run(other)
    own = runner.cache.private_roots(SCOPE)
    answer = [70, 71, 72, 73, 74]
    assert run(runner, own, [*one, *answer]) == 8
    assert run(runner, own, [*other, *answer]) == 8
    assert run(runner, own, [*one, *answer, 1]) == 13
    assert run(runner, own, [*other, *answer, 1]) == 13
