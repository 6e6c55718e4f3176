"""The thread that looks entries up on disk, so that a slow disk keeps nobody waiting but those who ask."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

# A look-up takes 0.1 ms; one that takes longer than making the prompt anew is of no use.
_PATIENCE_SECONDS: Final = 0.1


class _Question(NamedTuple):
    keys: Sequence[bytes]
    answer: "asyncio.Future[Any]"


class Reader(Generic[T]):
    """Asks one look-up after the other. Belongs to the event loop; the look-ups run on its thread."""

    def __init__(self, look_up: Callable[[Sequence[bytes]], T | None], at_end: Callable[[], None]) -> None:
        """look_up: gives None for what is not there, or cannot be had. at_end: called on the thread when it ends."""
        self._look_up = look_up
        self._at_end = at_end
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._late: asyncio.Future[T | None] | None = None
        # A daemon, because a disk that hangs would keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="cache reader", daemon=True)
        self._thread.start()

    async def ask(self, keys: Sequence[bytes]) -> T | None:
        """What is found; None also while the disk is slow. Raises TimeoutError the first time that it is."""
        if self._late is not None and not self._late.done():
            return None
        answer: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._questions.put(_Question(keys, answer))
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._late = answer
            raise

    def close(self, seconds: float) -> None:
        """Ends the thread; blocks for so long at most."""
        self._questions.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                found = self._look_up(question.keys)
            except Exception:  # whatever it was, those who ask later want answers too
                _log.exception("a look-up in the assembly cache failed")
                found = None
            loop = question.answer.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_give, question.answer, found)
        self._at_end()


def _give(answer: "asyncio.Future[Any]", found: object) -> None:
    if not answer.done():
        answer.set_result(found)
