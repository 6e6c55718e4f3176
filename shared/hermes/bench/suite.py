"""All runs of a benchmark, one after the other, so that nothing but the one that is measured is under load."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hermes.bench.driver import Driver
from hermes.bench.plan import Step
from hermes.bench.records import Run
from hermes.bench.targets import Target, TargetError


class Watcher(Protocol):
    """Who wants to know how far a benchmark is."""

    def step(self, step: Step) -> None:
        """A run begins."""

    def tick(self) -> None:
        """A request of it has ended."""

    def done(self, run: Run) -> None:
        """It has ended."""

    def trouble(self, what: str) -> None:
        """Something does not work that no figure depends on."""


async def facts_of(targets: Iterable[Target], watcher: Watcher) -> dict[str, Mapping[str, str | int]]:
    """What each server says of itself; nothing of one that does not tell."""
    found: dict[str, Mapping[str, str | int]] = {}
    for target in targets:
        try:
            found[target.name] = await target.facts()
        except TargetError as error:
            watcher.trouble(f"{target.name} does not tell what it serves: {error.message}")
            found[target.name] = {}
    return found


async def execute(
    targets: Sequence[Target], steps: Iterable[Step], request_seconds: float | None, watcher: Watcher
) -> None:
    """Makes the runs and hands them to the watcher.

    Raises TargetError where a server cannot be used at all.
    """
    complained: set[str] = set()
    for step in steps:
        watcher.step(step)
        driver = Driver(targets[step.target], request_seconds, watcher.tick)
        try:
            run = await driver.run(step.load, step.caches, step.seed, step.series)
        except TargetError as error:
            raise TargetError(error.reason, f"{driver.target.name} cannot be measured: {error.message}") from None
        except asyncio.CancelledError:  # Ctrl-C: what the run cached goes all the same
            await _forget(driver.target, complained, watcher.trouble)
            raise
        await _forget(driver.target, complained, watcher.trouble)
        watcher.done(run)


async def _forget(target: Target, complained: set[str], trouble: Callable[[str], None]) -> None:
    try:
        await target.end()
    except TargetError as error:
        if target.name not in complained:
            complained.add(target.name)
            trouble(f"what runs on {target.name} leave in its caches stays there: {error.message}")
