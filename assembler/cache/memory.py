"""The nearer tier: entries in this process's memory, the least recently used go first."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from assembler.cache.entry import Entry


class _Held(NamedTuple):
    entry: Entry
    tag: str


class MemoryTier:
    """Entries by key, bounded in bytes. Its methods may be called from any thread."""

    def __init__(self, max_bytes: int, max_age: float, on_evict: Callable[[int], None]) -> None:
        """max_age: seconds that an entry is good for after it was stored. on_evict: told how many had to go."""
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._on_evict = on_evict
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: bytes) -> Entry | None:
        """The entry, if it is there and not too old."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            if not held.entry.is_good(self._max_age):
                self._drop(key)
                return None
            self._held.move_to_end(key)
            return held.entry

    def peek(self, key: bytes) -> Entry | None:
        """As `get`, but what is used least stays so, and what is too old stays there."""
        with self._lock:
            held = self._held.get(key)
        return held.entry if held is not None and held.entry.is_good(self._max_age) else None

    def put(self, key: bytes, entry: Entry, tag: str) -> None:
        """Keeps an entry, unless it alone is larger than all may be."""
        if entry.size > self._max_bytes:
            return
        evicted = 0
        with self._lock:
            if key in self._held:
                self._drop(key)
            self._held[key] = _Held(entry, tag)
            self.bytes += entry.size
            while self.bytes > self._max_bytes:
                self._drop(next(iter(self._held)))
                evicted += 1
        if evicted:
            self._on_evict(evicted)

    def flush(self, tag: str | None) -> int:
        """Removes the entries with a tag, or all; returns how many there were."""
        with self._lock:
            keys = [key for key, held in self._held.items() if tag in (None, held.tag)]
            for key in keys:
                self._drop(key)
        return len(keys)

    def _drop(self, key: bytes) -> None:
        self.bytes -= self._held.pop(key).entry.size
