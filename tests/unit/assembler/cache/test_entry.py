import hashlib
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assembler.cache.entry import DamagedError, Entry, decoded, encoded
from assembler.findings import Finding

KEY = bytes(range(32))
ENTRY = Entry(
    array("I", [1, 2**32 - 1, 7]),
    1.5,
    2,
    (Finding("ROLE_ORDER", "Message 1 is odd — é.", 1, "Mend it.", 7, 0, 3), Finding("X", "")),
)

numbers = st.integers(0, 2**31)
places = st.none() | numbers
findings = st.builds(Finding, st.text(), st.text(), places, st.text(), numbers, places, places)
entries = st.builds(
    Entry,
    st.lists(st.integers(0, 2**32 - 1)).map(lambda ids: array("I", ids)),
    st.floats(allow_nan=False),
    st.integers(0, 2**32 - 1),
    st.lists(findings).map(tuple),
)


@given(st.binary(min_size=32, max_size=32), entries)
def test_what_is_read_is_what_was_written(key: bytes, entry: Entry) -> None:
    assert decoded(key, encoded(key, entry)) == entry


def test_ids_are_little_endian_on_disk() -> None:
    assert encoded(KEY, ENTRY).find(b"\x01\x00\x00\x00\xff\xff\xff\xff\x07\x00\x00\x00") > 0


def test_any_changed_byte_and_any_shorter_value_is_damage() -> None:
    data = encoded(KEY, ENTRY)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        with pytest.raises(DamagedError):
            decoded(KEY, bytes(changed))
        with pytest.raises(DamagedError):
            decoded(KEY, data[:place])
    with pytest.raises(DamagedError):
        decoded(KEY, data + b"\0")


@pytest.mark.parametrize(
    "findings",
    [
        b"[",
        b"5",
        b"[5]",
        b'[["A"]]',
        b'[[1, "text", null]]',
        b'[["A", "text", "x"]]',
        b'[["A", "text", 1, 2]]',
        b'[["A", "b", 1, "c", "2"]]',
        b'[["A", "b", 1, "c", 2, "3"]]',
    ],
)
def test_findings_that_are_none_are_damage_whatever_their_checksum_says(findings: bytes) -> None:
    body = bytearray(encoded(KEY, Entry(array("I"), 1.0))[: -hashlib.sha256().digest_size] + findings)
    body[-len(findings) - 5 : -len(findings) - 1] = len(findings).to_bytes(4, "little")
    with pytest.raises(DamagedError, match="findings"):
        decoded(KEY, bytes(body) + hashlib.sha256(body).digest())


def test_a_value_under_another_key_is_damage() -> None:
    with pytest.raises(DamagedError, match="another key"):
        decoded(bytes(32), encoded(KEY, ENTRY))


def test_the_size_counts_what_findings_take() -> None:
    findings = tuple(
        Finding("ROLE_ORDER", f"Message {index} is out of order: \u00e9.", index, f"Mend {index}.")
        for index in range(1000)
    )
    took = sum(sum(map(sys.getsizeof, (each, each.message, each.message_index, each.remedy))) for each in findings)
    told = Entry(array("I"), 1.0, 0, findings).size - Entry(array("I"), 1.0).size
    assert 0.9 * took <= told <= 1.2 * took
