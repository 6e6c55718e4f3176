import random
import re
import string
import uuid

import pytest

from assembler import spans
from assembler.spans import Kind

EXAMPLES = [
    (Kind.DATE, ["2026-11-30", "30.11.2026", "11/30/2026", "2026/11/30", "20261130", "2026年11月30日", "11月30日"]),
    (Kind.DATE, ["Monday, 30 November 2026", "November 30, 2026", "30 Nov 2026", "the 3rd of May", "30.11.26"]),
    (Kind.DATE, ["1. Dezember 2026", "10 décembre 2026", "12 de mayo de 2026", "30 ноября 2026", "2026년 11월 30일"]),
    (Kind.WEEKDAY, ["Tuesday", "Mon", "星期一"]),
    (Kind.DATE_TIME, ["2026-11-30T01:53:30.123Z", "2026-11-30 01:53:30+00:00", "Mon, 30 Nov 2026 01:53:30 GMT"]),
    (Kind.DATE_TIME, ["November 30, 2026 at 1:53 PM", "2026年11月30日15点30分", "20261130T015330Z"]),
    (Kind.DATE_TIME, ["Mon Nov  3 10:15:22 2026", "Mon Nov 30 10:15:22 UTC 2026", "30/Nov/2026:10:15:22 +0000"]),
    (Kind.TIME, ["10:32:11", "10:32:11.250", "1:53:30 PM", "01:53:30 UTC", "15时30分11秒"]),
    (Kind.HOUR, ["10:32", "1:53 PM", "3 pm", "01:53 UTC", "15点30分"]),
    (Kind.UUID, ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6"]),
    (Kind.HEX, ["deadbeefcafe", "0x7ffd12ab", "a1b2c3d", "9e107d9d372bb6826bd81d3542a419d6"]),
    (Kind.RANDOM, ["AbC9dE2xYz81", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "c2Vzc2lvbi-1MjM0NTY3ODkwQUJD_x9"]),
    (Kind.LONG_NUMBER, ["1764467610", "1764467610123", "482139017"]),
    (Kind.VERSION, ["10.0.20.65", "192.168.100.200", "1.2.31"]),
    (Kind.NUMBER, ["7", "17", "2041", "3.14", "10000", "12,345.6", "12th", "250ms"]),
]
AROUND = [
    "{}",
    "It is {} now.",
    "({})",
    "id={};",
    "当前：{}，请",
    "[{}]",
    '"{}"',
    "<now>{}</now>",
    "#{}\n",
    "user-{} x",
]


@pytest.mark.parametrize(("kind", "values"), EXAMPLES, ids=[kind.name + values[0] for kind, values in EXAMPLES])
def test_a_value_is_known_by_its_look_whatever_is_around_it(kind: Kind, values: list[str]) -> None:
    for value in values:
        for around in AROUND:
            text = around.format(value)
            start = text.index(value)
            (look,) = spans.looks(text, start, start + len(value))
            assert look.kind is kind, (text, look)
            shown = value.removeprefix("the 3rd of ").removesuffix(" of May")
            assert shown in text[look.start : look.end] or text[look.start : look.end] in value


@pytest.mark.parametrize("place", range(36))
def test_a_value_is_found_whole_by_any_of_its_characters(place: int) -> None:
    text = "Session f81d4fae-7dec-11d0-a765-00a0c91e6bf6, go on."
    (look,) = spans.looks(text, 8 + place, 9 + place)
    assert text[look.start : look.end] == "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"


@pytest.mark.parametrize(
    "text",
    ["a kind helper", "café", "x-ray", "accede", "decade", "Marching", "Sunny", "snake_case_name", "<|im_end|>", ""],
)
def test_words_are_no_values(text: str) -> None:
    assert spans.looks(text, 0, len(text)) == []


@pytest.mark.parametrize("word", ["user12", "T12", "v12"])
def test_a_number_at_a_words_end_is_one(word: str) -> None:
    (look,) = spans.looks(f"I am {word}.", 5, 5 + len(word))
    assert look == (Kind.NUMBER, 5 + len(word) - 2, 5 + len(word))


def test_a_value_beside_the_span_is_not_in_it() -> None:
    text = "On 2026-11-30 Ada came at 10:15."
    assert spans.looks(text, text.index("Ada"), text.index("Ada") + 3) == []


def test_random_hexadecimal_ids_and_uuids_are_known_as_such() -> None:
    chance = random.Random(3)
    for _ in range(500):
        digits = "".join(chance.choices(string.hexdigits[:16], k=chance.randint(8, 64)))
        (look,) = spans.looks(f"id {digits}.", 3, 3 + len(digits))
        assert look.kind is (Kind.HEX if re.search("[a-f]", digits) else look.kind)
        assert (look.start, look.end) == (3, 3 + len(digits))
        own = str(uuid.UUID(int=chance.getrandbits(128)))
        assert spans.looks(own, 0, 36) == [spans.Look(Kind.UUID, 0, 36)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Kind.DATE, Kind.DATE, Kind.DATE),
        (Kind.DATE, Kind.DATE_TIME, Kind.DATE_TIME),
        (Kind.HEX, Kind.NUMBER, Kind.HEX),
        (Kind.LONG_NUMBER, Kind.HEX, Kind.HEX),
        (Kind.NUMBER, Kind.LONG_NUMBER, Kind.LONG_NUMBER),
        (Kind.RANDOM, Kind.HEX, Kind.RANDOM),
        (Kind.HOUR, Kind.TIME, Kind.TIME),
        (Kind.WEEKDAY, Kind.DATE, Kind.DATE),
        (Kind.WEEKDAY, Kind.HOUR, Kind.DATE_TIME),
        (Kind.NUMBER, Kind.VERSION, Kind.VERSION),
        (Kind.UUID, Kind.DATE, Kind.TEXT),
        (Kind.NUMBER, Kind.TIME, Kind.TEXT),
    ],
)
def test_what_stands_at_one_place_of_two_texts_has_a_kind_that_takes_in_both(
    one: Kind, other: Kind, expected: Kind
) -> None:
    assert spans.common(one, other) is spans.common(other, one) is expected


def test_what_is_between_values_is_told_without_them() -> None:
    text = "On 2026-11-30 Ada came at 10:15."
    found = spans.looks(text, 0, len(text))
    assert [*spans.between(text, 0, len(text), found)] == ["On ", " Ada came at ", "."]
    assert [*spans.between(text, 5, 28, found)] == ["", " Ada came at ", ""]
