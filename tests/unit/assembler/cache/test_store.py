"""The database on disk: what it refuses, what it survives, and how large and old it lets things get."""

import multiprocessing
import os
import pickle
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from diskcache.core import MODE_BINARY, MODE_PICKLE, MODE_TEXT

from assembler.cache.entry import DamagedError
from assembler.cache.store import Item, Store, StoreError, _trouble

MIB = 2**20
AGE = 3600.0
KEY = bytes(range(32))


def row_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path, 64 * MIB, AGE)
    yield opened
    opened.close()


def database(root: Path) -> Path:
    return root / "entries-1" / "cache.db"


def tamper(root: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(database(root))
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def test_bytes_come_back_and_stay_over_a_new_start(store: Store, tmp_path: Path) -> None:
    value = os.urandom(200_000)
    store.put([Item(KEY, value, "a"), Item(row_key(1), b"", "b")])
    store.close()
    again = Store.open(tmp_path, 64 * MIB, AGE)
    assert (again.get(KEY), again.get(row_key(1)), again.get(row_key(2))) == (value, b"", None)
    assert len(again) == 2
    assert min(os.listdir(database(tmp_path).parent)) == "cache.db"
    assert not any(path.suffix == ".val" for path in tmp_path.rglob("*"))
    again.close()


def test_the_directory_is_the_users_alone(store: Store, tmp_path: Path) -> None:
    assert database(tmp_path).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["text", 1, 1.5, None, bytearray(b"x"), ["x"]])
def test_nothing_but_bytes_is_written(store: Store, value: object) -> None:
    with pytest.raises(DamagedError, match="no bytes"):
        store.put([Item(KEY, value, "a")])  # type: ignore[arg-type]
    assert store.get(KEY) is None


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("mode", [MODE_PICKLE, MODE_BINARY, MODE_TEXT, 17])
def test_a_row_that_says_it_is_a_pickle_or_a_file_is_damage_and_never_read(
    store: Store, tmp_path: Path, mode: int
) -> None:
    store.put([Item(KEY, b"value", "a")])
    tamper(tmp_path, "UPDATE Cache SET mode = ?, value = ?", mode, pickle.dumps(Bomb()))
    with pytest.raises(DamagedError):
        store.get(KEY)


@pytest.mark.parametrize("value", ["text", 5, None])
def test_a_row_whose_value_is_no_bytes_is_damage(store: Store, tmp_path: Path, value: object) -> None:
    store.put([Item(KEY, b"value", "a")])
    tamper(tmp_path, "UPDATE Cache SET value = ?", value)
    with pytest.raises(DamagedError):
        store.get(KEY)


def test_a_file_that_a_tampered_row_names_is_neither_read_nor_removed(store: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"secret")
    store.put([Item(KEY, b"value", "a")])
    tamper(tmp_path, "UPDATE Cache SET mode = ?, filename = ?, value = NULL", MODE_BINARY, "../precious")
    with pytest.raises(DamagedError):
        store.get(KEY)
    store.remove(KEY)
    store.put([Item(KEY, b"value", "a")])
    tamper(tmp_path, "UPDATE Cache SET filename = ?", "../precious")
    assert store.flush(None) == 1
    assert precious.read_bytes() == b"secret"


def test_a_flush_takes_one_tag_or_all(store: Store) -> None:
    store.put([Item(row_key(number), b"v", "ab"[number % 2]) for number in range(300)])
    assert store.flush("a") == 150
    assert (store.get(row_key(0)), store.get(row_key(1))) == (None, b"v")
    assert store.flush(None) == 150


def test_all_files_together_keep_to_the_size(tmp_path: Path) -> None:
    limit = 24 * MIB
    store = Store.open(tmp_path, limit, AGE)
    most = removed = 0
    for start in range(0, 2400, 24):
        store.put([Item(row_key(number), os.urandom(32_000), "a") for number in range(start, start + 24)])
        removed += store.tidy()
        most = max(most, sum(file.stat().st_size for file in database(tmp_path).parent.iterdir()))
    assert most <= 1.1 * limit
    assert len(store) + removed == 2400
    assert len(store) * 32_000 > limit / 2
    assert (store.get(row_key(0)), store.get(row_key(2399)) is None) == (None, False)
    store.close()


def test_what_is_too_old_is_not_found_and_goes_with_the_next_tidying(tmp_path: Path) -> None:
    age = 1.0
    store = Store.open(tmp_path, 64 * MIB, age)
    store.put([Item(KEY, b"v", "a")])
    assert store.get(KEY) == b"v"
    time.sleep(1.1 * age)
    assert store.get(KEY) is None
    assert (len(store), store.tidy(), len(store)) == (1, 1, 0)
    store.close()


def break_randomly(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    file.write_bytes(data)


BREAKS = {
    "overwritten": lambda file: file.write_bytes(b"no database at all" * 1000),
    "scrambled": break_randomly,
    "empty": lambda file: os.truncate(file, 0),
    "halved": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one page": lambda file: os.truncate(file, 4096),
    "odd length": lambda file: os.truncate(file, 5000),
}


def trouble_with(root: Path) -> StoreError | None:
    """What keeps a database from being used; None where nothing does. Whatever it gives is what was written."""
    try:
        opened = Store.open(root, 64 * MIB, AGE)
        for number in range(100):
            assert opened.get(row_key(number)) in (None, bytes([number]) * 30_000)
        opened.put([Item(row_key(number), b"x" * 30_000, "a") for number in range(100, 300)])
        opened.tidy()
    except StoreError as error:
        return error
    return None


@pytest.mark.parametrize("damage", BREAKS)
def test_a_broken_database_is_told_as_such_or_still_right_and_a_new_one_takes_its_place(
    tmp_path: Path, damage: str
) -> None:
    first = Store.open(tmp_path, 64 * MIB, AGE)
    first.put([Item(row_key(number), bytes([number]) * 30_000, "a") for number in range(100)])
    first.close()
    BREAKS[damage](database(tmp_path))
    trouble = trouble_with(tmp_path)
    assert trouble is None or trouble.is_broken
    renewed = Store.replace(tmp_path, 64 * MIB, AGE, broken=None)
    renewed.put([Item(KEY, b"v", "a")])
    assert (renewed.get(KEY), len(renewed)) == (b"v", 1)
    renewed.close()
    assert [path.name for path in tmp_path.iterdir() if "broken" in path.name] == []


def test_one_that_another_process_has_replaced_is_opened_and_not_replaced_again(tmp_path: Path) -> None:
    mine, others = (Store.open(tmp_path, 64 * MIB, AGE) for _ in range(2))
    renewed = Store.replace(tmp_path, 64 * MIB, AGE, broken=others)
    renewed.put([Item(KEY, b"v", "a")])
    assert mine.is_gone()
    again = Store.replace(tmp_path, 64 * MIB, AGE, broken=mine)
    assert again.get(KEY) == b"v"
    for each in (mine, others, renewed, again):
        each.close()


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entries-1").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to another user") as caught:
        Store.open(tmp_path, 64 * MIB, AGE)
    assert not caught.value.is_broken


def open_and_use(root: Path, number: int, start: "multiprocessing.synchronize.Barrier") -> None:
    start.wait(60)
    store = Store.open(root, 64 * MIB, AGE)
    store.put([Item(row_key(number), b"v", "a")])
    store.close()


def test_eight_processes_that_open_it_at_once_all_can(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(8)
    processes = [spawn.Process(target=open_and_use, args=(tmp_path / "new", number, start)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    store = Store.open(tmp_path / "new", 64 * MIB, AGE)
    assert len(store) == 8
    store.close()


@pytest.mark.parametrize(
    ("code", "is_broken"),
    [
        (sqlite3.SQLITE_IOERR_WRITE, False),
        (sqlite3.SQLITE_IOERR_FSYNC, False),
        (sqlite3.SQLITE_IOERR_SHORT_READ, True),
        (sqlite3.SQLITE_IOERR_READ, True),
        (sqlite3.SQLITE_CORRUPT_INDEX, True),
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, False),
    ],
)
def test_what_cannot_be_written_is_not_broken_and_what_cannot_be_read_is(code: int, is_broken: bool) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    assert _trouble(error).is_broken is is_broken
