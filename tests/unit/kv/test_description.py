"""What people are told of the tree."""

from collections.abc import Callable
from typing import Any

from executor.kv.node import Scope

MakeRunner = Callable[..., Any]
HEAD = list(range(8))
LONG = [*HEAD, *range(100, 112)]
SHORT = [*HEAD, *range(200, 206)]


def test_a_run_without_a_fork_is_one_branch(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(LONG)
    (branch,) = runner.cache.describe(None, 20)
    assert (branch.id, branch.parent_id, branch.start, branch.tokens, branch.children) == (1, 0, 0, 20, 0)
    assert (branch.namespace, branch.head) == ("a", tuple(HEAD[:4]))


def test_branches_name_the_one_they_hang_on_and_the_largest_comes_first(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(LONG)
    runner.run(SHORT)
    longest, head, shortest = runner.cache.describe(None, 20)
    assert [(b.start, b.tokens, b.children) for b in (longest, head, shortest)] == [(8, 12, 0), (0, 8, 2), (8, 6, 0)]
    assert longest.parent_id == shortest.parent_id == head.id
    assert head.parent_id == 0
    assert longest.head == (100, 101, 102, 103)


def test_a_branch_keeps_its_name_while_it_grows_and_when_it_forks(make_runner: MakeRunner):
    runner = make_runner()
    names = set()
    for tokens in (HEAD, LONG, SHORT):
        runner.run(tokens)
        names |= {branch.id for branch in runner.cache.describe(None, 20) if branch.start == 0}
    assert names == {1}


def test_only_so_many_are_listed(make_runner: MakeRunner):
    runner = make_runner(blocks=64)
    for first in range(10):
        runner.run([first] * (first + 1))
    assert [branch.tokens for branch in runner.cache.describe(None, 3)] == [10, 9, 8]
    assert runner.cache.describe(None, 0) == []


def test_a_namespace_can_be_listed_alone(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(LONG, namespace="a")
    runner.run(SHORT, namespace="b")
    assert [branch.namespace for branch in runner.cache.describe(None, 20)] == ["a", "b"]
    assert [branch.tokens for branch in runner.cache.describe("b", 20)] == [14]
    assert runner.cache.describe("c", 20) == []


def test_it_tells_who_reads_finds_and_pins(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(LONG)
    runner.run(SHORT)
    running = runner.begin(LONG)
    fork = runner.fork(running, LONG, 20)
    other = runner.open(LONG)
    runner.cache.pins.pin(Scope("a", "model", "full"), SHORT, 9.0)
    longest, head, shortest = runner.cache.describe(None, 20, [[*running.path, *fork.path], other.path])
    assert [(b.running, b.hits, b.pinned) for b in (longest, head, shortest)] == [
        (2, 2, False),
        (2, 3, True),
        (0, 0, True),
    ]


def test_idle_is_the_time_since_the_last_use_and_nothing_while_it_is_read(make_runner: MakeRunner):
    runner = make_runner()
    runner.run(LONG)
    runner.now = 5.0
    running = runner.begin(SHORT)
    runner.now = 12.0
    idle = {branch.start: branch.idle for branch in runner.cache.describe(None, 1)}
    assert idle == {8: 12.0}
    assert runner.cache.describe(None, 2)[1].idle == 0.0
    running.finish(SHORT, 14)
    runner.now = 15.0
    assert [branch.idle for branch in runner.cache.describe(None, 20)] == [15.0, 3.0, 3.0]


def test_what_nobody_finds_is_not_listed(make_runner: MakeRunner):
    runner = make_runner()
    runner.begin(LONG, write=False)
    assert runner.cache.describe(None, 20) == []
