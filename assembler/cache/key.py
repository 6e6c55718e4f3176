"""Keys: SHA-256 over everything that can change what is kept under them, each field framed by its length."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

# Of the keys themselves.
_SCHEMA: Final = "hermes assembly 1"
_LENGTH_BYTES: Final = 8


class Keys:
    """Makes the keys of one kind of entry on one server."""

    def __init__(self, kind: str, facts: Iterable[str]) -> None:
        """facts: whatever of the server can change an entry's value."""
        self._base = hashlib.sha256()
        for field in (_SCHEMA, kind, _source(), *facts):
            frame(self._base, field.encode())

    def begin(self, *fields: bytes) -> Any:
        """A digest with the fields in it, that can go on."""
        digest = self._base.copy()
        for field in fields:
            frame(digest, field)
        return digest

    def key(self, *fields: bytes) -> bytes:
        """32 bytes."""
        key: bytes = self.begin(*fields).digest()
        return key


@functools.cache
def _source() -> str:
    """A digest of the assembler's own code: another one may assemble in another way."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        frame(digest, str(file.relative_to(package)).encode())
        frame(digest, file.read_bytes())
    return digest.hexdigest()


def frame(digest: Any, field: bytes) -> None:
    """Adds a field with its length before it, so that no two lists of fields look alike."""
    digest.update(len(field).to_bytes(_LENGTH_BYTES, "little"))
    digest.update(field)


def tag_of(namespace: str) -> str:
    """What entries of a namespace are marked with, so that they can be removed together."""
    return hashlib.sha256(namespace.encode()).hexdigest()
