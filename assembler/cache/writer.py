"""The thread that writes to disk behind the requests, in batches, and never makes one wait."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from assembler.cache.entry import Entry

# Waiting writes, in entries and in bytes; more are dropped, which costs a miss.
_MOST_WAITING: Final = 4096
_MOST_WAITING_BYTES: Final = 32 * 2**20
# One transaction: large enough to be worth its commit, small against any limit of the disk's.
_BATCH: Final = 64
_BATCH_BYTES: Final = 2**20
# That a write waits for others to share its commit with; each takes the interpreter's lock from those who serve.
_LINGER_SECONDS: Final = 0.05
# Between looks at what is too old, or gone.
_TICK_SECONDS: Final = 1.0

_log: Final = logging.getLogger(__name__)


class Write(NamedTuple):
    """An entry to write. tag: its namespace's."""

    key: bytes
    entry: Entry
    tag: str


class Work(NamedTuple):
    """Something else to do in its turn, and where the outcome goes."""

    do: Callable[[], int]
    outcome: "Future[int]"


class Writer:
    """Hands batches of writes to `write`, other work to itself, and calls `tick` in between.

    An error of the work's goes into its outcome. Owned by the disk tier.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Write]], None],
        tick: Callable[[], None],
        at_end: Callable[[], None],
    ) -> None:
        self._write = write
        self._tick = tick
        self._at_end = at_end
        self._waiting: queue.Queue[Write | Work | None] = queue.Queue(_MOST_WAITING)
        self._bytes = 0
        self._bytes_lock = threading.Lock()
        # A daemon, because a disk that hangs would keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="cache writer", daemon=True)
        self._thread.start()

    def put(self, write: Write) -> bool:
        """Takes a write, unless too many wait already. Returns at once."""
        size = write.entry.size
        with self._bytes_lock:
            if self._bytes + size > _MOST_WAITING_BYTES:
                return False
            self._bytes += size
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self._taken(size)
            return False
        return True

    def do(self, work: Callable[[], int]) -> "Future[int]":
        """Has something done after all that waits now. Raises queue.Full where too much waits."""
        outcome: Future[int] = Future()
        self._waiting.put_nowait(Work(work, outcome))
        return outcome

    def close(self, seconds: float) -> None:
        """Writes what waits and ends the thread; blocks for so long at most."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):  # the disk hangs; the thread ends with the process
            self._waiting.put(None, timeout=seconds)
            self._thread.join(max(end - time.monotonic(), 0.0))

    def _taken(self, size: int) -> None:
        with self._bytes_lock:
            self._bytes -= size

    def _run(self) -> None:
        self._tick()
        while True:
            try:
                first = self._waiting.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self._tick()
                continue
            if isinstance(first, Write):
                time.sleep(_LINGER_SECONDS)
            if not self._handled(first):
                break
        self._at_end()

    def _handled(self, first: Write | Work | None) -> bool:
        """Does the first thing, with the writes that wait behind it. False where that was the end."""
        batch: list[Write] = []
        size = 0
        item: Write | Work | None = first
        while isinstance(item, Write):
            batch.append(item)
            size += item.entry.size
            if len(batch) == _BATCH or size >= _BATCH_BYTES:
                break
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                break
        if batch:
            self._write_all(batch)
            self._taken(size)
        if isinstance(item, Work):
            _done(item)
        return item is not None

    def _write_all(self, batch: Sequence[Write]) -> None:
        try:
            self._write(batch)
        except Exception:  # whatever it was, what comes later is to be done too
            _log.exception("writing to the assembly cache failed")


def _done(work: Work) -> None:
    try:
        work.outcome.set_result(work.do())
    except Exception as error:  # it is the asker's to handle
        work.outcome.set_exception(error)
