"""A directory of entries on disk that several processes share: diskcache, held to bytes, opened one at a time."""

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import diskcache
from diskcache.core import DBNAME

from assembler.cache.bytes_disk import BytesDisk
from assembler.cache.entry import DamagedError

# Part of the path, so that another version does not find what it cannot read.
_NAME: Final = "entries-1"
_MODE: Final = 0o700
# Several open at once after a common start, and each open writes.
_LOCK_SECONDS: Final = 10.0
_LOCK_AGAIN_SECONDS: Final = 0.01
# For another process's write to end; ours takes milliseconds.
_BUSY_SECONDS: Final = 2.0
# What the log of writes takes beside the database: SQLite empties it at 4 MiB, behind at most one batch.
_LOG_BYTES: Final = 6 * 2**20
_SETTINGS: Final = {
    "eviction_policy": "least-recently-stored",  # the others write with each read
    "statistics": 0,  # likewise
    "tag_index": 1,
    "cull_limit": 0,  # else each write removes others on its way
    "disk_min_file_size": 2**31 - 1,  # no value goes to a file of its own
    "sqlite_mmap_size": 0,  # a mapped database that somebody truncates ends the process
    "sqlite_cache_size": 1000,  # pages of 4 KiB, of each thread's connection
    "sqlite_journal_size_limit": 4 * 2**20,
}
# Primary result codes that say that the database is not one, or no longer whole. https://www.sqlite.org/rescode.html
_BROKEN: Final = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA})
# Of the errors of reading and writing those that say so, too; the others come of quotas and the like, and pass.
_BROKEN_READS: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_IOERR_READ,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    }
)


class StoreError(Exception):
    """The disk would not. is_broken: the database is damaged, and only another one will help."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class Item(NamedTuple):
    """One value to write. tag: its namespace's."""

    key: bytes
    value: bytes
    tag: str


class Store:
    """The open database. Each thread that uses it has a connection of its own, which it closes with `close`."""

    def __init__(self, cache: diskcache.Cache, max_age: float) -> None:
        self._cache = cache
        self._max_age = max_age
        self._file = Path(cache.directory) / DBNAME
        self._inode = _inode(self._file)

    @classmethod
    def open(cls, root: Path, max_bytes: int, max_age: float) -> Self:
        """Opens the database in a directory, and makes both where they are missing.

        max_bytes: of all files together. max_age: seconds. Raises StoreError.
        """
        with _told(), _locked(root):
            return cls._opened(root, max_bytes, max_age)

    @classmethod
    def replace(cls, root: Path, max_bytes: int, max_age: float, *, broken: "Store | None") -> Self:
        """Opens a new database in the place of a broken one, unless another process has done so. Raises StoreError."""
        with _told(), _locked(root):
            directory = root / _NAME
            inode = _inode(directory / DBNAME)
            if broken is None or broken._inode == inode:
                aside = root / f"{_NAME}.broken-{os.getpid()}-{time.time_ns()}"
                if directory.exists():
                    directory.rename(aside)
                    shutil.rmtree(aside, ignore_errors=True)
            return cls._opened(root, max_bytes, max_age)

    @classmethod
    def _opened(cls, root: Path, max_bytes: int, max_age: float) -> Self:
        directory = root / _NAME
        directory.mkdir(mode=_MODE, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise StoreError(f"{directory} belongs to another user")
        directory.chmod(_MODE)
        limit = max(max_bytes - _LOG_BYTES, max_bytes // 2)
        cache = diskcache.Cache(str(directory), timeout=_BUSY_SECONDS, disk=BytesDisk, size_limit=limit, **_SETTINGS)
        return cls(cache, max_age)

    def is_gone(self) -> bool:
        """Whether somebody has removed or replaced the database's file."""
        return _inode(self._file) != self._inode

    def get(self, key: bytes) -> bytes | None:
        """The value, if there is one. Raises DamagedError, or StoreError."""
        with _told():
            value: bytes | None = self._cache.get(key)
            return value

    def put(self, items: Sequence[Item]) -> None:
        """Writes values, all or none. Raises StoreError."""
        with _told(), self._cache.transact():
            for item in items:
                self._cache.set(item.key, item.value, expire=self._max_age, tag=item.tag)

    def remove(self, key: bytes) -> None:
        """Removes a value, if it is there. Raises StoreError."""
        with _told():
            self._cache.delete(key)

    def flush(self, tag: str | None) -> int:
        """Removes the values with a tag, or all; returns how many. Raises StoreError."""
        with _told():
            removed: int = self._cache.clear() if tag is None else self._cache.evict(tag)
            return removed

    def tidy(self) -> int:
        """Removes what is too old, and the oldest beyond the size; returns how many. Raises StoreError."""
        with _told():
            if self._cache.reset("size"):  # of values in files, of which there are none; cull would believe it
                raise StoreError("its count of bytes is damaged", is_broken=True)
            removed: int = self._cache.cull()
            return removed

    def bytes(self) -> int:
        """Bytes of the database, without its log. Raises StoreError."""
        with _told():
            volume: int = self._cache.volume()
            return volume

    def __len__(self) -> int:
        with _told():
            return len(self._cache)

    def close(self) -> None:
        """Closes the connection of the thread that calls."""
        with _told():
            self._cache.close()


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:
        return None


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time opens or replaces; SQLite's own lock would turn the others away."""
    root.mkdir(mode=_MODE, parents=True, exist_ok=True)
    with (root / f"{_NAME}.lock").open("ab") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError("another process holds its lock") from None
                time.sleep(_LOCK_AGAIN_SECONDS)
            else:
                break
        yield


@contextmanager
def _told() -> Iterator[None]:
    """Whatever diskcache and SQLite raise, as a StoreError."""
    try:
        yield
    except (StoreError, DamagedError):
        raise
    except diskcache.Timeout as error:
        # diskcache says so of whatever keeps a transaction from beginning.
        cause = error.__context__
        raise _trouble(cause) if isinstance(cause, sqlite3.Error) else StoreError("it is locked") from error
    except sqlite3.Error as error:
        raise _trouble(error) from error
    except OSError as error:
        raise StoreError(error.strerror or str(error)) from error
    except Exception as error:  # settings in the database that no diskcache has written
        raise StoreError(f"{type(error).__name__}: {error}", is_broken=True) from error


def _trouble(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    return StoreError(str(error), is_broken=code is None or code & 0xFF in _BROKEN or code in _BROKEN_READS)
