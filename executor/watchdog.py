"""Watches that the engine steps: one that hangs in a step turns health to NOT_SERVING, and back when it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0


class Stepping(Protocol):
    """What the watchdog knows of an engine."""

    @property
    def busy_seconds(self) -> float:
        """How long the step takes that runs now; 0 while the engine sleeps."""


class Watchdog:
    """Looks at an engine from the event loop."""

    def __init__(self, engine: Stepping, limit_seconds: float) -> None:
        """limit_seconds: a step that takes longer counts as hanging."""
        self._engine = engine
        self._limit_seconds = limit_seconds
        self._hangs = False

    async def watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Tells whether the engine steps, whenever that changes. Until it is cancelled; what fails is tried again."""
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._limit_seconds / 2))
            try:
                await self.look(tell)
            except Exception:
                log.exception("the health of the engine could not be told; trying again")

    async def look(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Looks once."""
        busy = self._engine.busy_seconds
        hangs = busy > self._limit_seconds
        if hangs == self._hangs:
            return
        await tell(not hangs)
        self._hangs = hangs
        if hangs:
            log.error("the engine hangs: a step has run for %.0f s; requests wait, health is NOT_SERVING", busy)
        else:
            log.warning("the engine steps again")
