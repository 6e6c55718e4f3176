"""Token ids as bytes: little-endian uint32, which is how they stand on disk and, as fixed32, on the wire."""

import functools
import sys
from array import array
from typing import Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from assembler.tokenizer import TokenIds

ID_BYTES: Final = 4
_SEVEN_BITS: Final = 0x7F
_LENGTH_DELIMITED: Final = 2  # the wire type of a packed field


def to_bytes(ids: TokenIds) -> bytes:
    """The ids' bytes."""
    return _swapped(ids).tobytes()


def from_bytes(data: bytes) -> TokenIds:
    """The ids of bytes, of which there are four each."""
    return _swapped(array("I", data))


def add(message: Message, field: str, ids: TokenIds) -> None:
    """Adds ids to a field of fixed32, as many at a time as there are; one by one 8,000 take half a millisecond."""
    tag = _tag(message.DESCRIPTOR, field)
    message.MergeFromString(b"".join((tag, _varint(ID_BYTES * len(ids)), memoryview(_swapped(ids)))))


@functools.cache
def _tag(descriptor: Descriptor, field: str) -> bytes:
    return _varint(descriptor.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def _varint(number: int) -> bytes:
    """Protobuf's own way to write a number: seven bits a byte, the lowest first, all but the last marked."""
    digits = bytearray()
    while number > _SEVEN_BITS:
        digits.append(number & _SEVEN_BITS | _SEVEN_BITS + 1)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _swapped(ids: TokenIds) -> TokenIds:
    """The ids with the machine's order of bytes made little-endian, or the other way round."""
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids
