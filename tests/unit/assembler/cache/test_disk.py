"""The disk tier in trouble: a miss, a count and a warning, and well again by itself."""

import asyncio
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from assembler.cache import disk, reader, writer
from assembler.cache.cache import AssemblyCache
from assembler.cache.disk import DiskLimits, DiskTier, Found
from assembler.cache.memory import MemoryTier
from assembler.cache.notices import Notices
from assembler.cache.store import Store, StoreError
from shared.errors import HermesError
from tests.unit.assembler.cache.conftest import Counts, entry, key

MIB = 2**20
SECONDS = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy with other tests."""
    monkeypatch.setattr(disk, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(reader, "_PATIENCE_SECONDS", SECONDS)


@asynccontextmanager
async def opened(
    directory: Path, counts: Counts, max_bytes: int = 64 * MIB, max_age: float = 3600.0
) -> AsyncIterator[DiskTier]:
    tier = DiskTier(DiskLimits(directory, max_bytes, max_age), counts)
    await asyncio.to_thread(tier.wait_until_open, SECONDS)
    yield tier
    await asyncio.to_thread(tier.close)


async def written(tier: DiskTier) -> None:
    """Returns when all that was put has been written, or dropped."""
    await asyncio.wrap_future(tier._writer.do(lambda: 0))


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await true():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.02)


def database(directory: Path) -> Path:
    return directory / "entries-1" / "cache.db"


async def works_again(tier: DiskTier) -> None:
    """Returns when entries are kept and found."""
    async with asyncio.timeout(SECONDS):
        number = 10**6
        while True:
            number += 1
            tier.put(key(number), entry(), "a")
            await written(tier)
            if await tier.get([key(number)]) is not None:
                return
            await asyncio.sleep(0.05)


async def test_entries_are_found_in_the_order_of_the_keys_and_by_the_next_process(
    tmp_path: Path, counts: Counts
) -> None:
    first, second = entry(10_000), entry()
    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), first, "a")
        tier.put(key(2), second, "a")
        await written(tier)
        assert await tier.get([key(9), key(2), key(1)]) == Found(key(2), second)
    async with opened(tmp_path, counts) as tier:
        assert await tier.get([key(1)]) == Found(key(1), first)
        assert await tier.get([key(9)]) is None
    assert not counts


async def test_an_entry_that_is_too_old_by_now_is_not_given(tmp_path: Path, counts: Counts) -> None:
    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), entry(stored=time.time() - 100), "a")
        await written(tier)
        assert await tier.get([key(1)]) is not None
    async with opened(tmp_path, counts, max_age=50.0) as tier:
        assert await tier.get([key(1)]) is None


async def test_a_damaged_entry_is_a_miss_is_counted_said_and_dropped(
    tmp_path: Path, counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, counts) as tier:
        for number in range(3):
            tier.put(key(number), entry(), "a")
        await written(tier)
        connection = sqlite3.connect(database(tmp_path))
        connection.execute("UPDATE Cache SET value = x'00' WHERE key = ?", (key(0),))
        connection.execute("UPDATE Cache SET mode = 4, value = ? WHERE key = ?", (pickle.dumps([1]), key(1)))
        connection.commit()
        connection.close()
        with caplog.at_level(logging.WARNING):
            assert await tier.get([key(0)]) is None
            assert (await tier.get([key(1), key(2)]) or Found(b"", entry())).key == key(2)
        assert counts == {"damaged": 2}
        assert "damaged" in caplog.text
        await written(tier)
        assert await tier.get([key(0), key(1)]) is None
        assert counts == {"damaged": 2}


async def test_an_entry_written_again_behind_the_damaged_one_stays(tmp_path: Path, counts: Counts) -> None:
    async with opened(tmp_path, counts) as tier:
        tier.put(key(0), entry(), "a")
        await written(tier)
        connection = sqlite3.connect(database(tmp_path))
        connection.execute("UPDATE Cache SET value = x'00'")
        connection.commit()
        connection.close()
        assert await tier.get([key(0)]) is None
        tier.put(key(0), entry(), "a")
        await written(tier)
        assert await tier.get([key(0)]) is not None


@pytest.mark.parametrize("damage", ["before", "while open"])
async def test_a_broken_database_is_replaced(
    tmp_path: Path, counts: Counts, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, counts) as tier:
        for number in range(200):
            tier.put(key(number), entry(8000), "a")
        await written(tier)
        if damage == "while open":
            os.truncate(database(tmp_path), 8192)
            for number in range(200):
                await tier.get([key(number)])
            await works_again(tier)
    if damage == "before":
        database(tmp_path).write_bytes(os.urandom(100_000))
        async with opened(tmp_path, counts) as tier:
            await works_again(tier)
    assert counts["troubles"] > 0
    assert "has trouble, which costs hits" in caplog.text


async def test_a_directory_deleted_underneath_comes_back(
    tmp_path: Path, counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    async with opened(directory, counts) as tier:
        tier.put(key(1), entry(), "a")
        await written(tier)
        shutil.rmtree(directory)

        async def noticed() -> bool:
            return counts["troubles"] > 0

        await until(noticed)
        await works_again(tier)
        assert await tier.get([key(1)]) is None
    assert "somebody has removed its database" in caplog.text
    assert database(directory).exists()


async def test_a_directory_that_cannot_be_made_costs_hits_and_nothing_else(
    tmp_path: Path, counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    async with opened(tmp_path / "file" / "cache", counts) as tier:
        tier.put(key(1), entry(), "a")
        assert await tier.get([key(1)]) is None
    assert counts["dropped"] == 1
    assert counts["troubles"] > 0
    assert "Not a directory" in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_a_full_disk_costs_hits_and_nothing_else(
    small_disk: Path, counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(small_disk / "cache", counts, max_bytes=256 * MIB) as tier:
        for number in range(600):
            tier.put(key(number), entry(8000), "a")
            if number % 50 == 0:
                await written(tier)
        await written(tier)
        assert counts["dropped"] > 0
        assert "full" in caplog.text
        assert await tier.get([key(0)]) is not None
        assert await tier.get([key(599)]) is None


@pytest.fixture
def read_only_disk(small_disk: Path) -> Path:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk


async def test_a_read_only_directory_is_done_without(read_only_disk: Path, counts: Counts) -> None:
    async with opened(read_only_disk / "cache", counts) as tier:
        tier.put(key(1), entry(), "a")
        assert await tier.get([key(1)]) is None
    assert counts["troubles"] > 0


async def test_a_disk_that_hangs_keeps_nobody_waiting_and_is_used_again_afterwards(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, real = threading.Event(), Store.get

    def slow(store: Store, which: bytes) -> bytes | None:
        hang.wait(SECONDS)
        return real(store, which)

    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), entry(), "a")
        await written(tier)
        monkeypatch.setattr(Store, "get", slow)
        monkeypatch.setattr(reader, "_PATIENCE_SECONDS", 0.1)
        assert await tier.get([key(1)]) is None
        assert counts["troubles"] == 1
        assert [await tier.get([key(1)]) for _ in range(100)] == [None] * 100
        assert counts["troubles"] == 1
        hang.set()
        monkeypatch.setattr(reader, "_PATIENCE_SECONDS", SECONDS)

        async def is_found() -> bool:
            return await tier.get([key(1)]) is not None

        await until(is_found)


async def test_writes_that_the_disk_cannot_keep_up_with_are_dropped_and_counted(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), Store.put

    def slow(store: Store, items: object) -> None:
        go.wait(SECONDS)
        real(store, items)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "put", slow)
    async with opened(tmp_path, counts) as tier:
        large = entry(1_000_000)
        for number in range(20):
            tier.put(key(number), large, "a")
        assert counts["dropped"] == 20 - 8  # of 4 MB each, 32 MiB may wait
        go.set()
        await written(tier)
        assert await tier.get([key(0)]) is not None


@pytest.mark.parametrize("method", ["get", "put"])
async def test_an_error_that_nobody_foresaw_ends_no_thread(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    async with opened(tmp_path, counts) as tier:
        with monkeypatch.context() as broken:
            broken.setattr(Store, method, fail)
            tier.put(key(1), entry(), "a")
            await written(tier)
            assert await tier.get([key(1)]) is None
        assert "unforeseen" in caplog.text
        await works_again(tier)


async def test_a_flush_that_the_disk_does_not_do_is_told(tmp_path: Path, counts: Counts) -> None:
    (tmp_path / "file").touch()
    memory = MemoryTier(10**6, 3600.0, lambda _: None)
    async with opened(tmp_path / "file" / "cache", counts) as tier:
        cache = AssemblyCache(memory, tier)
        cache.keep(key(1), entry(), "")
        with pytest.raises(HermesError) as caught:
            await cache.flush(None)
    assert caught.value.reason == "CACHE_UNAVAILABLE"
    assert len(memory) == 0


async def test_a_flush_that_the_disk_does_not_do_reaches_the_memories_of_the_others(
    tmp_path: Path, counts: Counts
) -> None:
    (tmp_path / "file").touch()
    memories = [MemoryTier(10**6, 3600.0, lambda _: None) for _ in range(2)]
    places = [tmp_path / "flushed", tmp_path / "file" / "cache" / "flushed"]
    async with opened(tmp_path / "file" / "cache", counts) as tier:
        one, two = (AssemblyCache(memory, tier, [Notices(place) for place in places]) for memory in memories)
        await two.start(SECONDS)
        two.keep(key(1), entry(), "")
        with pytest.raises(HermesError):
            await one.flush(None)

        async def flushed() -> bool:
            return not len(memories[1])

        await until(flushed)
        await two.close()


async def test_what_is_wrong_with_the_notices_of_flushes_ends_none_that_come_later(
    tmp_path: Path, counts: Counts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, notices = MemoryTier(10**6, 3600.0, lambda _: None), Notices(tmp_path / "flushed")
    cache = AssemblyCache(memory, None, [notices])

    def fail() -> None:
        raise RuntimeError("unforeseen")

    async def empty() -> bool:
        return not len(memory)

    await cache.start(SECONDS)
    with monkeypatch.context() as broken:
        broken.setattr(notices, "news", fail)
        cache.keep(key(1), entry(), "")
        await until(empty)
    assert "unforeseen" in caplog.text
    cache.keep(key(1), entry(), "")
    Notices(tmp_path / "flushed").post(None)
    await until(empty)
    await cache.close()


async def test_a_flush_does_not_wait_for_the_rest_after_trouble(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_PAUSE_SECONDS", 1000.0)
    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), entry(), "a")
        await written(tier)
        with monkeypatch.context() as broken:
            broken.setattr(Store, "put", lambda *_: (_ for _ in ()).throw(StoreError("locked")))
            tier.put(key(2), entry(), "a")
            await written(tier)
        assert await tier.flush(None) == 1


async def test_a_count_of_bytes_that_is_damaged_empties_the_cache_once_and_not_for_ever(
    tmp_path: Path, counts: Counts
) -> None:
    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), entry(), "a")
        await written(tier)
        with sqlite3.connect(database(tmp_path)) as connection:
            connection.execute("UPDATE Settings SET value = 1000000000000000 WHERE key = 'size'")
        connection.close()
        await works_again(tier)
        await until(lambda: _settled(tier))
    assert counts["troubles"] >= 1


async def _settled(tier: DiskTier) -> bool:
    """Whether entries stay over a look at the size."""
    await works_again(tier)
    before = tier.sizes.entries
    await asyncio.wrap_future(tier._writer.do(lambda: tier._tick() or 0))
    return 0 < before <= tier.sizes.entries < 10**6 and tier.sizes.bytes < 64 * MIB


async def test_a_busy_event_loop_and_a_queue_of_look_ups_are_no_trouble_of_the_disk(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(reader, "_QUEUE_SECONDS", SECONDS)
    look_up = Store.get

    def slower(store: Store, wanted: bytes) -> bytes | None:
        time.sleep(0.005)
        return look_up(store, wanted)

    monkeypatch.setattr(Store, "get", slower)
    async with opened(tmp_path, counts) as tier:
        tier.put(key(1), entry(), "a")
        await written(tier)
        asked = [asyncio.create_task(tier.get([key(1)])) for _ in range(40)]
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - what a busy event loop is
        assert all(found is not None for found in await asyncio.gather(*asked))
    assert not counts


async def test_a_flush_comes_after_what_was_put_before_it(tmp_path: Path, counts: Counts) -> None:
    async with opened(tmp_path, counts) as tier:
        for number in range(100):
            tier.put(key(number), entry(), "ab"[number % 2])
        assert await tier.flush("a") == 50
        assert await tier.get([key(0)]) is None
        assert await tier.get([key(1)]) is not None
        assert tier.sizes.entries == 50
        assert await tier.flush(None) == 50


async def test_what_waits_is_written_before_the_end(tmp_path: Path, counts: Counts) -> None:
    async with opened(tmp_path, counts) as tier:
        for number in range(500):
            tier.put(key(number), entry(), "a")
    async with opened(tmp_path, counts) as tier:
        assert await tier.get([key(499)]) is not None


async def test_eviction_is_counted_and_runs_behind_the_writes(tmp_path: Path, counts: Counts) -> None:
    async with opened(tmp_path, counts, max_bytes=16 * MIB) as tier:
        for number in range(800):
            tier.put(key(number), entry(8000), "a")
            if number % 100 == 0:
                await written(tier)
        await written(tier)
        assert counts["evicted"] > 100
        assert tier.sizes.bytes <= 16 * MIB
        assert tier.sizes.entries == 800 - counts["evicted"]


async def test_closing_does_not_wait_for_a_disk_that_hangs_with_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MOST_WAITING", 2)
    hung, goes_on = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        hung.set()
        goes_on.wait(SECONDS)

    stuck = writer.Writer(hang, lambda: None, lambda: None)
    stuck.put(writer.Write(key(0), entry(), "a"))
    assert await asyncio.to_thread(hung.wait, SECONDS)
    while stuck.put(writer.Write(key(1), entry(), "a")):
        pass
    async with asyncio.timeout(SECONDS / 2):
        await asyncio.to_thread(stuck.close, 0.05)
    goes_on.set()
