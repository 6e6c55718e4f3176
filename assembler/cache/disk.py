"""The farther tier: entries on disk, shared by processes and kept over restarts. Its troubles cost hits, nothing else.

Two threads: one looks up, one writes and tidies. Neither keeps a request waiting, and neither raises: what goes wrong
is counted and logged, and the database is opened again, anew where it is damaged.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from assembler.cache.entry import DamagedError, Entry, decoded, encoded
from assembler.cache.reader import Reader
from assembler.cache.store import Item, Store, StoreError
from assembler.cache.writer import Write, Writer

# After trouble, before the disk is tried again.
_PAUSE_SECONDS: Final = 5.0
# Of the disk's limit, how much is written before the size is looked at; besides, that is done once a second.
_TIDY_SHARE: Final = 64
# The same trouble comes with each request; the log says it once in so long.
_SAY_AGAIN_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 5.0

_log: Final = logging.getLogger(__name__)


class DiskLimits(NamedTuple):
    """directory: the entries' own. max_bytes: of all files. max_age: seconds after which an entry is no good."""

    directory: Path
    max_bytes: int
    max_age: float


class Sizes(NamedTuple):
    """How much there is in a tier."""

    entries: int
    bytes: int


class Found(NamedTuple):
    """An entry, and which of the keys that were asked for it stands under."""

    key: bytes
    entry: Entry


class DiskCounts(Protocol):
    """Who is told of what happens on disk; from any thread."""

    def damaged(self) -> None: ...

    def disk_trouble(self) -> None: ...

    def writes_dropped(self, count: int) -> None: ...

    def evicted(self, count: int) -> None: ...


class DiskTier:
    """Entries on disk. `get`, `put` and `flush` belong to the event loop."""

    def __init__(self, limits: DiskLimits, counts: DiskCounts) -> None:
        self._limits = limits
        self._counts = counts
        self._store: Store | None = None
        self._opened = threading.Event()
        self._rest_until = 0.0
        self._said: dict[str, float] = {}
        self._broken: Store | None = None
        self._untidied = 0  # bytes written since the size was looked at
        self.sizes = Sizes(0, 0)
        self._read_from: Store | None = None
        self._reader = Reader(self._look_up, self._stop_reading)
        self._writer = Writer(self._write, self._tick, self._stop_writing)

    def wait_until_open(self, seconds: float) -> bool:
        """Blocks until the database was opened for the first time, or could not be."""
        return self._opened.wait(seconds)

    async def get(self, keys: Sequence[bytes]) -> Found | None:
        """The entry under the first of the keys that has one."""
        if self._store is None:
            return None
        try:
            return await self._reader.ask(keys)
        except TimeoutError:
            self._trouble(StoreError("it is slow"), None)
            return None

    def put(self, key: bytes, entry: Entry, tag: str) -> None:
        """Writes an entry soon, or drops it where the disk cannot keep up."""
        if self._store is None or not self._writer.put(Write(key, entry, tag)):
            self._counts.writes_dropped(1)

    async def flush(self, tag: str | None) -> int:
        """Removes the entries with a tag, or all, and returns how many. Raises StoreError, or queue.Full."""
        return await asyncio.wrap_future(self._writer.do(lambda: self._flush(tag)))

    def close(self) -> None:
        """Writes what waits, and ends both threads; blocks for some seconds at most."""
        self._reader.close(_CLOSE_SECONDS)
        self._writer.close(_CLOSE_SECONDS)

    # On the reader's thread.

    def _look_up(self, keys: Sequence[bytes]) -> Found | None:
        store = self._store
        if self._read_from is not store:
            self._stop_reading()
            self._read_from = store
        if store is None:
            return None
        for key in keys:
            try:
                data = store.get(key)
                entry = None if data is None else decoded(key, data)
            except DamagedError as error:
                self._drop_damaged(key, error)
            except StoreError as error:
                self._trouble(error, store)
                return None
            else:
                if entry is not None and entry.is_good(self._limits.max_age):
                    return Found(key, entry)
        return None

    def _drop_damaged(self, key: bytes, error: DamagedError) -> None:
        self._counts.damaged()
        self._say(f"An entry of the assembly cache in {self._limits.directory} is damaged and dropped: {error}.")
        with contextlib.suppress(queue.Full):  # then the next one who finds it drops it
            self._writer.do(lambda: self._remove(key))

    def _stop_reading(self) -> None:
        if self._read_from is not None:
            self._close(self._read_from)

    # On the writer's thread.

    def _write(self, writes: Sequence[Write]) -> None:
        store = self._usable()
        if store is None:
            self._counts.writes_dropped(len(writes))
            return
        try:
            items = [Item(write.key, encoded(write.key, write.entry), write.tag) for write in writes]
            store.put(items)
            self._untidied += sum(len(item.value) for item in items)
            if self._untidied > self._limits.max_bytes // _TIDY_SHARE:
                self._tidy(store)
        except StoreError as error:
            self._counts.writes_dropped(len(writes))
            self._give_rest(error, store)

    def _remove(self, key: bytes) -> int:
        store = self._usable()
        if store is not None:
            store.remove(key)
        return 1

    def _flush(self, tag: str | None) -> int:
        self._rest_until = 0.0  # somebody waits for it, and is told of trouble
        store = self._usable()
        if store is None:
            raise StoreError("it cannot be opened")
        removed = store.flush(tag)
        self._tidy(store)
        return removed

    def _tick(self) -> None:
        store = self._usable()
        if store is None:
            return
        try:
            self._tidy(store)
        except StoreError as error:
            self._give_rest(error, store)

    def _tidy(self, store: Store) -> None:
        self._untidied = 0
        removed = store.tidy()
        if removed:
            self._counts.evicted(removed)
        self.sizes = Sizes(len(store), store.bytes())

    def _usable(self) -> Store | None:
        """The store, opened again or anew where that is needed; None while it cannot be used."""
        if time.monotonic() < self._rest_until:
            return None
        store = self._store
        try:
            if store is not None and store is self._broken:
                self._store = Store.replace(*self._limits, broken=store)
                self._close(store)
            elif store is not None and store.is_gone():
                self._trouble(StoreError("somebody has removed its database"), store)
                self._store = None
                self._close(store)
            if self._store is None:
                self._store = self._open()
        except StoreError as error:
            self._give_rest(error, None)
        finally:
            self._opened.set()
        return self._store

    def _open(self) -> Store:
        try:
            return Store.open(*self._limits)
        except StoreError as error:
            if not error.is_broken:
                raise
            self._trouble(error, None)
            return Store.replace(*self._limits, broken=None)

    def _give_rest(self, error: StoreError, store: Store | None) -> None:
        self._trouble(error, store)
        self._rest_until = time.monotonic() + _PAUSE_SECONDS

    def _stop_writing(self) -> None:
        if self._store is not None:
            self._close(self._store)

    # On any thread.

    def _close(self, store: Store) -> None:
        """Closes the calling thread's connection."""
        try:
            store.close()
        except StoreError as error:
            self._trouble(error, None)

    def _trouble(self, error: StoreError, store: Store | None) -> None:
        """store: the one that had it; a broken one is replaced by the writer."""
        if error.is_broken:
            self._broken = store
        self._counts.disk_trouble()
        self._say(f"The assembly cache in {self._limits.directory} has trouble, which costs hits: {error}.")

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said.get(text, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
            self._said[text] = now
            _log.warning("%s", text)
