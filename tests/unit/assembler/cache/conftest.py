"""Entries, keys, and a count of what happens on disk."""

import os
import time
from array import array
from collections import Counter

import pytest

from assembler.cache.entry import Entry


def entry(tokens: int = 100, stored: float | None = None) -> Entry:
    return Entry(array("I", os.urandom(4 * tokens)), time.time() if stored is None else stored)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Counts(Counter[str]):
    """What a disk tier tells."""

    def damaged(self) -> None:
        self["damaged"] += 1

    def disk_trouble(self) -> None:
        self["troubles"] += 1

    def writes_dropped(self, count: int) -> None:
        self["dropped"] += count

    def evicted(self, count: int) -> None:
        self["evicted"] += count


@pytest.fixture
def counts() -> Counts:
    return Counts()
