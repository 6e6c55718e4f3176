import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hermes.bench.driver import Driver
from hermes.bench.loads import Caches, Load, Wishes, Workload
from hermes.bench.plan import Plan, Series
from hermes.bench.suite import execute, facts_of
from hermes.bench.targets import Call, Reply, TargetError


@dataclass
class FakeTarget:
    """Answers with the number of the call; fails where `fails` says so."""

    fails: Callable[[Call], TargetError | None] = lambda call: None
    name: str = "fake:1"
    forgets: bool = True
    hangs: bool = False
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    log: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        self.log.append("begin")

    async def answer(self, call: Call, heard: Callable[[], None]) -> Reply:
        number = len(self.calls)
        self.calls.append(call)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if (error := self.fails(call)) is not None:
                raise error
            heard()
            if self.hangs and call.max_tokens > 8:
                self.hanging.set()
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            heard()
        finally:
            self.at_once -= 1
        return Reply(f"answer {number}", prompt_tokens=100, cached_tokens=40, completion_tokens=2)

    async def end(self) -> None:
        self.log.append("end")
        if not self.forgets:
            raise TargetError("NO", "it cannot forget")

    async def facts(self) -> dict[str, str | int]:
        if not self.forgets:
            raise TargetError("NO", "it does not tell")
        return {"context_length": 512}

    async def close(self) -> None:
        self.log.append("close")


def small(workload: Workload = Workload.SERVICE, **wishes: int) -> Load:
    return Wishes(
        **{"users": 3, "rounds": 2, "concurrency": 2, "words": 20, "question": 5, "max_tokens": 9} | wishes
    ).of(workload)


def of_the_run(target: FakeTarget) -> list[Call]:
    """Its calls without the warm-up's."""
    return [call for call in target.calls if call.max_tokens == 9]


async def drive(
    target: FakeTarget, load: Load, caches: Caches = Caches.ON, seconds: float | None = None, seed: int = 1
):
    ticks: list[None] = []
    run = await Driver(target, seconds, lambda: ticks.append(None)).run(load, caches, seed)
    assert len(ticks) == load.requests
    return run


async def test_every_user_asks_every_round_and_no_more_than_so_many_at_once():
    target = FakeTarget()
    run = await drive(target, small(users=7, rounds=3, concurrency=3))
    assert sorted((each.user, each.round) for each in run.exchanges) == [(u, r) for u in range(7) for r in range(3)]
    assert target.most_at_once == 3
    assert all(each.failure is None and len(each.pieces) == 2 for each in run.exchanges)
    assert all(each.begin + each.seconds <= run.seconds for each in run.exchanges)


async def test_a_conversation_sends_all_that_was_said_before():
    target = FakeTarget()
    await drive(target, small(users=1, rounds=3, concurrency=1))
    first, second, third = (call.messages for call in of_the_run(target))
    assert [message.role for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert second[:2] == first
    assert third[:4] == second
    assert second[2].content == "answer 1"


@pytest.mark.parametrize("workload", [Workload.QUESTIONS, Workload.RAG, Workload.UNIQUE])
async def test_without_history_every_round_stands_alone(workload):
    target = FakeTarget()
    await drive(target, small(workload))
    assert all([message.role for message in call.messages] == ["system", "user"] for call in of_the_run(target))


async def test_in_the_worst_case_every_round_of_every_user_has_its_own_system_text():
    target = FakeTarget()
    await drive(target, small(Workload.UNIQUE, users=3, rounds=2))
    assert len({call.messages[0].content for call in of_the_run(target)}) == 6


async def test_the_warm_up_is_no_part_of_the_run_and_shares_nothing_with_it():
    target = FakeTarget()
    run = await drive(target, small(concurrency=2))
    warm_up = [call for call in target.calls if call.max_tokens == 8]
    assert len(warm_up) == run.warm_up == 2
    assert target.calls[:2] == warm_up
    said = {message.content for call in of_the_run(target) for message in call.messages}
    assert not said & {message.content for call in warm_up for message in call.messages}


async def test_all_requests_have_the_runs_setting_of_the_caches():
    for caches in Caches:
        target = FakeTarget()
        await drive(target, small(), caches)
        assert {call.caches for call in target.calls} == {caches}


async def test_the_load_is_the_same_with_the_caches_on_and_off():
    on, off = FakeTarget(), FakeTarget()
    await drive(on, small(users=1, concurrency=1), Caches.ON)
    await drive(off, small(users=1, concurrency=1), Caches.OFF)
    assert [call.messages for call in on.calls] == [call.messages for call in off.calls]


async def test_what_fails_is_kept_with_its_reason_and_the_conversation_goes_on_without_it():
    def fails(call: Call) -> TargetError | None:
        return TargetError("FULL", "there is too much load") if len(call.messages) == 4 else None

    target = FakeTarget(fails)
    run = await drive(target, small(users=1, rounds=4, concurrency=1))
    assert [each.failure for each in run.exchanges] == [None, *["FULL: there is too much load"] * 3]
    assert len(run.exchanges) == 4
    assert all(not each.prompt_tokens for each in run.exchanges[1:])
    assert len(of_the_run(target)[-1].messages) == 4, "what failed is in no later prompt"


async def test_a_request_that_takes_too_long_has_failed():
    run = await drive(FakeTarget(hangs=True), small(users=2, rounds=1), seconds=0.05)
    assert [each.failure for each in run.exchanges] == ["TIMEOUT: No whole answer came within 0.05 s."] * 2
    assert all(each.pieces for each in run.exchanges), "what had come is kept"


async def test_a_server_that_answers_no_warm_up_cannot_be_measured():
    target = FakeTarget(lambda call: TargetError("GONE", "nobody is there: start one"))
    with pytest.raises(TargetError) as error:
        await Driver(target, None, lambda: None).run(small(), Caches.ON, 1)
    assert (error.value.reason, error.value.message) == ("GONE", "nobody is there: start one")
    assert not of_the_run(target)


@dataclass
class Watching:
    troubles: list[str] = field(default_factory=list)
    runs: list[object] = field(default_factory=list)
    order: list[tuple[int, str, int]] = field(default_factory=list)

    def step(self, step) -> None:
        self.order.append((step.target, step.caches, step.seed))

    def tick(self) -> None:
        pass

    def done(self, run) -> None:
        self.runs.append(run)

    def trouble(self, what: str) -> None:
        self.troubles.append(what)


def plan(caches: tuple[Caches, ...], seeds: tuple[int, ...]) -> Plan:
    wishes = Wishes(users=1, rounds=1, concurrency=1, words=10, question=5, max_tokens=9)
    return Plan((Workload.SERVICE,), (), wishes, caches, seeds)


async def test_servers_take_turns_with_the_same_seed_and_the_order_turns_around():
    targets, watching = [FakeTarget(name="a"), FakeTarget(name="b")], Watching()
    await execute(targets, plan((Caches.ON,), (5, 6, 7)).steps(2, None), None, watching)
    assert watching.order == [(0, "on", 5), (1, "on", 5), (1, "on", 6), (0, "on", 6), (0, "on", 7), (1, "on", 7)]
    ours, theirs = ({tuple(call.messages) for call in of_the_run(target)} for target in targets)
    assert ours == theirs
    assert len(ours) == 3


async def test_caches_are_on_and_off_in_turn_and_each_run_is_forgotten():
    target, watching = FakeTarget(), Watching()
    await execute([target], plan(tuple(Caches), (1, 2)).steps(1, None), None, watching)
    assert watching.order == [(0, "on", 1), (0, "off", 1), (0, "off", 2), (0, "on", 2)]
    assert target.log == ["begin", "end"] * 4
    assert len(watching.runs) == 4
    assert not watching.troubles


async def test_a_run_that_is_broken_off_is_forgotten_too():
    target, watching = FakeTarget(hangs=True), Watching()
    running = asyncio.create_task(execute([target], plan((Caches.ON,), (1,)).steps(1, None), None, watching))
    await target.hanging.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert target.log == ["begin", "end"]
    assert (target.at_once, watching.runs) == (0, [])


async def test_a_server_that_cannot_forget_or_tell_is_measured_all_the_same_and_said_once():
    target, watching = FakeTarget(forgets=False), Watching()
    assert await facts_of([target], watching) == {"fake:1": {}}
    await execute([target], plan(tuple(Caches), (1,)).steps(1, None), None, watching)
    assert len(watching.runs) == 2
    assert [each.partition(": ")[2] for each in watching.troubles] == ["it does not tell", "it cannot forget"]


def test_a_series_is_run_from_small_to_large_with_the_caches_in_turn():
    steps = Plan((), (Series.USERS, Series.CONCURRENCY), Wishes(), tuple(Caches), (1,)).steps(1, None)
    users = [step.load.users for step in steps if step.series == "users"]
    assert users == [users for size in (1, 2, 4, 8, 16, 32, 64) for users in (size, size)]
    at_once = [step.load.concurrency for step in steps if step.series == "concurrency"]
    assert at_once[::2] == [1, 2, 4, 8, 16, 32, 64]
    assert [step.caches for step in steps[:2]] == list(Caches)
