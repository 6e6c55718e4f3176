import time
from array import array

from assembler.cache.entry import Entry
from assembler.cache.memory import MemoryTier

AGE = 1000.0


def entry(tokens: int = 100, age: float = 0.0) -> Entry:
    return Entry(array("I", range(tokens)), time.time() - age)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Tier(MemoryTier):
    def __init__(self, max_bytes: int) -> None:
        self.evicted = 0
        super().__init__(max_bytes, AGE, self.count)

    def count(self, evicted: int) -> None:
        self.evicted += evicted


def test_the_least_recently_used_goes_first_and_the_bytes_never_exceed_the_bound() -> None:
    room = 10 * entry().size
    tier = Tier(room)
    for number in range(10):
        tier.put(key(number), entry(), "a")
    assert tier.get(key(0)) is not None
    for number in range(10, 19):
        tier.put(key(number), entry(), "a")
        assert tier.bytes <= room
    assert tier.get(key(0)) is not None
    assert [tier.get(key(number)) is None for number in range(1, 10)] == [True] * 9
    assert (len(tier), tier.evicted, tier.bytes) == (10, 9, room)


def test_bytes_are_those_of_what_is_held_whatever_was_put_over_what() -> None:
    tier = Tier(10**6)
    tier.put(key(1), entry(500), "a")
    tier.put(key(1), entry(3), "a")
    assert tier.bytes == entry(3).size
    tier.flush(None)
    assert (tier.bytes, len(tier)) == (0, 0)


def test_an_entry_larger_than_the_bound_is_not_held_and_pushes_nothing_out() -> None:
    tier = Tier(entry().size)
    tier.put(key(1), entry(), "a")
    tier.put(key(2), entry(10_000), "a")
    assert (tier.get(key(1)) is None, tier.get(key(2))) == (False, None)


def test_what_is_too_old_is_not_given() -> None:
    tier = Tier(10**6)
    tier.put(key(1), entry(age=AGE + 1), "a")
    tier.put(key(2), entry(age=AGE - 100), "a")
    assert tier.get(key(1)) is None
    assert tier.get(key(2)) is not None
    assert len(tier) == 1


def test_a_flush_takes_one_namespace_or_all() -> None:
    tier = Tier(10**6)
    for number, tag in enumerate("aab"):
        tier.put(key(number), entry(), tag)
    assert tier.flush("a") == 2
    assert tier.get(key(2)) is not None
    assert tier.flush(None) == 1


def test_what_a_clock_that_was_ahead_has_stored_is_not_given_for_years() -> None:
    tier = Tier(10**6)
    tier.put(key(1), entry(age=-30.0), "a")
    tier.put(key(2), entry(age=-86_400.0), "a")
    assert (tier.get(key(1)) is None, tier.get(key(2)) is None) == (False, True)
