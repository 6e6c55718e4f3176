"""How the engine's events reach the handlers on the event loop: one wake-up a step, however many requests ran."""

from __future__ import annotations

import asyncio

from executor.events import Event


class Mailbox:
    """The events of one request on their way from the engine to its handler; a slow reader finds them joined."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Called on the event loop."""
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All that has come since the last time, at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


class Outbox:
    """Carries the events of all requests to the event loop, one wake-up a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._step: list[tuple[Mailbox, Event]] = []

    def put(self, mailbox: Mailbox, event: Event) -> None:
        """Called on the engine's thread."""
        self._step.append((mailbox, event))

    def flush(self) -> None:
        """Called on the engine's thread at the end of a step."""
        if self._step:
            step, self._step = self._step, []
            self._loop.call_soon_threadsafe(_deliver, step)


def _deliver(step: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in step:
        mailbox.put(event)
