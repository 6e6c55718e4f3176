"""The assembly cache: the memory tier over the disk tier."""

import asyncio
import contextlib
import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from assembler.cache.disk import DiskTier, Sizes
from assembler.cache.entry import Entry
from assembler.cache.key import tag_of
from assembler.cache.memory import MemoryTier
from assembler.cache.notices import Notices
from assembler.cache.store import StoreError
from shared.errors import HermesError, unavailable

# How often a process looks whether another one has flushed.
_LOOK_SECONDS: Final = 0.25
# A process that flushes answers when the others have had time to look.
_TIME_TO_LOOK: Final = 2 * _LOOK_SECONDS
_FLUSH_SECONDS: Final = 10.0

_log: Final = logging.getLogger(__name__)


class Tier(Enum):
    """Where an entry was found."""

    MEMORY = "memory"
    DISK = "disk"


class Hit(NamedTuple):
    """An entry, the key that it was found under, and where."""

    key: bytes
    entry: Entry
    tier: Tier


class AssemblyCache:
    """Entries by key, in two tiers. Never keeps the event loop waiting.

    disk: None where only the memory is used. notices: where flushes of other processes are told; each of them is told
    in all places, because one may be out of order.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier | None = None, notices: Iterable[Notices] = ()) -> None:
        self._memory = memory
        self._disk = disk
        self._notices = tuple(notices)
        self._watching: asyncio.Task[None] | None = None
        self._on_flush: list[Callable[[str | None], None]] = []

    async def start(self, seconds: float) -> None:
        """Waits until the disk is open, for so long at most, and begins to listen for flushes."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.wait_until_open, seconds)
        if self._notices:
            self._watching = asyncio.create_task(self._watch(), name="flush notices")

    async def close(self) -> None:
        """Writes what waits to be written, for some seconds at most."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)

    def also_flush(self, flush: Callable[[str | None], None]) -> None:
        """Calls it with each flush: with the tag of a namespace, or with None for everything."""
        self._on_flush.append(flush)

    def recall(self, keys: Iterable[bytes]) -> Hit | None:
        """The entry in memory under the first of the keys that has one there. May be called from any thread."""
        for key in keys:
            entry = self._memory.get(key)
            if entry is not None:
                return Hit(key, entry, Tier.MEMORY)
        return None

    async def fetch(self, keys: Sequence[bytes], namespace: str) -> Hit | None:
        """The entry on disk under the first of the keys that has one there; it is in memory from now on."""
        found = None if self._disk is None or not keys else await self._disk.get(keys)
        if found is None:
            return None
        self._memory.put(found.key, found.entry, tag_of(namespace))
        return Hit(found.key, found.entry, Tier.DISK)

    def keep(self, key: bytes, entry: Entry, namespace: str) -> None:
        """Keeps an entry in memory at once, and on disk soon. May be called from any thread."""
        tag = tag_of(namespace)
        self._memory.put(key, entry, tag)
        if self._disk is not None:
            self._disk.put(key, entry, tag)

    def looking(self) -> "Onlooker":
        """The same entries for one who only looks."""
        return Onlooker(self._memory, self._disk)

    async def flush(self, namespace: str | None) -> int:
        """Removes the entries of a namespace, or all, here and in every process that shares the cache.

        Returns how many there were on disk, or in memory without one. Raises HermesError CACHE_UNAVAILABLE.
        """
        tag = None if namespace is None else tag_of(namespace)
        removed = self._flush_memory(tag)
        try:
            if self._disk is not None:
                removed = await self._flush_disk(self._disk, tag)
        finally:  # the others' memories can be flushed, whatever the disk is at
            told = await asyncio.to_thread(self._post, tag)
            await asyncio.sleep(_TIME_TO_LOOK)
        if self._notices and not told:
            raise _unavailable("the other processes cannot be told")
        return removed

    async def _flush_disk(self, disk: DiskTier, tag: str | None) -> int:
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                return await disk.flush(tag)
        except TimeoutError as error:
            raise _unavailable("it is slow") from error
        except queue.Full as error:
            raise _unavailable("too much waits to be written") from error
        except (StoreError, OSError) as error:
            raise _unavailable(str(error)) from error

    def _flush_memory(self, tag: str | None) -> int:
        for flush in self._on_flush:
            flush(tag)
        return self._memory.flush(tag)

    def _post(self, tag: str | None) -> int:
        """Tells the other processes, and returns in how many places that was possible."""
        told = 0
        for notices in self._notices:
            try:
                notices.post(tag)
            except OSError as error:
                _log.warning("a flush of the assembly cache cannot be told in %s: %s", notices, error)
            else:
                told += 1
        return told

    def _news(self) -> set[str | None]:
        """What other processes flushed since the last look: tags, None for everything."""
        news: set[str | None] = set()
        for notices in self._notices:
            with contextlib.suppress(OSError):  # the one who flushed was told of such trouble
                news.update(notices.news())
        return news

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                for tag in await asyncio.to_thread(self._news):
                    self._flush_memory(tag)
                    if self._disk is not None:  # what this process wrote while the other one flushed
                        await self._disk.flush(tag)
            except (StoreError, queue.Full):  # the one who flushed was told of such trouble, too
                continue
            except Exception:  # or this process would never hear of a flush again
                _log.exception("flushes of other processes cannot be heard of; everything in memory is dropped")
                self._flush_memory(None)

    @property
    def in_memory(self) -> Sizes:
        """What is in this process's memory."""
        return Sizes(len(self._memory), self._memory.bytes)

    @property
    def on_disk(self) -> Sizes:
        """What was on disk a moment ago, of all processes together."""
        return Sizes(0, 0) if self._disk is None else self._disk.sizes


class Onlooker(AssemblyCache):
    """Finds what a cache has, and changes nothing: no entry comes, moves from disk to memory, or is used later."""

    def recall(self, keys: Iterable[bytes]) -> Hit | None:
        for key in keys:
            entry = self._memory.peek(key)
            if entry is not None:
                return Hit(key, entry, Tier.MEMORY)
        return None

    async def fetch(self, keys: Sequence[bytes], namespace: str) -> Hit | None:  # noqa: ARG002 - keeps nothing for it
        found = None if self._disk is None or not keys else await self._disk.get(keys)
        return None if found is None else Hit(found.key, found.entry, Tier.DISK)

    def keep(self, key: bytes, entry: Entry, namespace: str) -> None:
        """Nothing."""


def _unavailable(why: str) -> HermesError:
    return unavailable("CACHE_UNAVAILABLE", f"The assembly cache on disk cannot be flushed, {why}: try again later.")
