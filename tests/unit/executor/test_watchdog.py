"""An engine that hangs in a step is seen, and so is that it goes on."""

import asyncio
import logging

from executor.watchdog import Watchdog


class Engine:
    busy_seconds = 0.0


async def test_health_follows_a_step_that_hangs_and_goes_on(caplog) -> None:
    engine, told = Engine(), []

    async def tell(serving: bool) -> None:
        told.append(serving)

    watchdog = Watchdog(engine, limit_seconds=10)
    with caplog.at_level(logging.WARNING):
        for busy in (0.0, 9.0, 11.0, 50.0, 0.5, 1.0):
            engine.busy_seconds = busy
            await watchdog.look(tell)
    assert told == [False, True]
    assert ["hangs" in caplog.messages[0], "steps again" in caplog.messages[1]] == [True, True]


async def test_what_could_not_be_told_is_told_at_the_next_look(caplog) -> None:
    engine, told = Engine(), asyncio.Queue()
    fails = [True]

    async def tell(serving: bool) -> None:
        told.put_nowait(serving)
        if fails:
            fails.pop()
            raise ConnectionError("the health service is gone")

    engine.busy_seconds = 50.0
    watching = asyncio.create_task(Watchdog(engine, limit_seconds=0.01).watch(tell))
    assert [await told.get(), await told.get()] == [False, False]
    engine.busy_seconds = 0.0
    assert await told.get() is True
    watching.cancel()
    assert "could not be told" in caplog.messages[0]
