"""What is kept of an assembly, and how it stands on disk."""

import hashlib
import json
import struct
import sys
import time
from dataclasses import dataclass
from typing import Final

from assembler import packed
from assembler.findings import Finding
from assembler.tokenizer import TokenIds

# Layout: head, ids as little-endian uint32, findings as JSON, SHA-256 over all before it. The head is the magic, the
# key that the entry was stored under, when (seconds since 1970), ids, dropped rounds, bytes of findings, has_own.
_MAGIC: Final = b"HAC3"
_HEAD: Final = struct.Struct("<4s32sdIII?")
_CHECKSUM_BYTES: Final = hashlib.sha256().digest_size
# An entry in memory besides its ids and texts: its object, its key, its place in the table (measured, rounded up).
_OVERHEAD_BYTES: Final = 512
# By so much the clocks of processes that share a disk may differ.
_CLOCK_SECONDS: Final = 60.0
# A finding besides its message and its remedy: its tuple, its index, its place in the list.
_FINDING_BYTES: Final = 140


class DamagedError(ValueError):
    """Bytes that are not what was stored under their key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """ids: must not be changed, since all hits share them. stored: seconds since 1970.

    dropped_rounds, findings: what else the caller is told of the prompt; a beginning has none.
    has_own: of a beginning, whether ids in it are those that the model chose for an answer.
    """

    ids: TokenIds
    stored: float
    dropped_rounds: int = 0
    findings: tuple[Finding, ...] = ()
    has_own: bool = False

    def is_good(self, max_age: float) -> bool:
        """Whether it was stored so many seconds ago at most, and not in a time to come."""
        return -_CLOCK_SECONDS < time.time() - self.stored < max_age

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, nearly."""
        texts = sum(_FINDING_BYTES + sys.getsizeof(each.message) + sys.getsizeof(each.remedy) for each in self.findings)
        return _OVERHEAD_BYTES + packed.ID_BYTES * len(self.ids) + texts


def encoded(key: bytes, entry: Entry) -> bytes:
    """The entry's bytes for the disk, under a key of 32 bytes."""
    findings = json.dumps(entry.findings).encode() if entry.findings else b""
    head = _HEAD.pack(_MAGIC, key, entry.stored, len(entry.ids), entry.dropped_rounds, len(findings), entry.has_own)
    body = b"".join((head, packed.to_bytes(entry.ids), findings))
    return body + hashlib.sha256(body).digest()


def decoded(key: bytes, data: bytes) -> Entry:
    """The entry in bytes that were found under a key. Raises DamagedError."""
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(data) < _HEAD.size + _CHECKSUM_BYTES or hashlib.sha256(body).digest() != checksum:
        raise DamagedError("its checksum is not that of its bytes")
    magic, own_key, stored, ids, dropped_rounds, findings, has_own = _HEAD.unpack_from(body)
    end = _HEAD.size + packed.ID_BYTES * ids
    if magic != _MAGIC or own_key != key or len(body) != end + findings:
        raise DamagedError("it belongs to another key or another version")
    return Entry(
        ids=packed.from_bytes(body[_HEAD.size : end]),
        stored=stored,
        dropped_rounds=dropped_rounds,
        findings=_findings(body[end:]) if findings else (),
        has_own=has_own,
    )


def _findings(data: bytes) -> tuple[Finding, ...]:
    try:
        found = tuple(Finding(*each) for each in json.loads(data))
    except (TypeError, ValueError) as error:
        raise DamagedError("its findings are none") from error
    for each in found:
        texts, places = (each.code, each.message, each.remedy), (each.message_index, each.start, each.end)
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(place is None or isinstance(place, int) for place in places)
            or not isinstance(each.tokens, int)
        ):
            raise DamagedError("its findings are none")
    return found
