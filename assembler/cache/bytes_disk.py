"""How diskcache keeps our values: as the bytes that they are, in the database, and in no other way.

diskcache believes what a row says about itself: one that says it holds a pickle is unpickled (CVE-2025-69872), one
that names a file has that file read, and removed when the row goes. Whoever can write to the directory could run code
with that, so nothing but raw bytes comes in or out here.
"""

import sqlite3
from typing import Any, Final, NoReturn

import diskcache
from diskcache.core import MODE_RAW, UNKNOWN

from assembler.cache.entry import DamagedError

_RAW: Final = True


class BytesDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Keys and values are bytes."""

    def put(self, key: Any) -> tuple[Any, bool]:
        return sqlite3.Binary(_checked(key)), _RAW

    def get(self, key: Any, raw: Any) -> bytes:
        if raw != _RAW:
            raise DamagedError("its key is no bytes")
        return _checked(key)

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, Any]:  # noqa: ARG002
        if read:
            raise TypeError("only bytes are stored, no files")
        return 0, MODE_RAW, None, sqlite3.Binary(_checked(value))

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or read:
            raise DamagedError("its row says that it is no bytes")
        return _checked(value)

    def filename(self, key: Any = UNKNOWN, value: Any = UNKNOWN) -> NoReturn:  # noqa: ARG002
        raise TypeError("no value is stored in a file")

    def remove(self, file_path: str) -> None:
        """Does nothing: no row of ours names a file, and what another one names is not ours to remove."""


def _checked(value: Any) -> bytes:
    if type(value) is not bytes:
        raise DamagedError("it is no bytes")
    return value
