import random
import uuid

from hypothesis import given, settings
from hypothesis import strategies as st

from assembler import differences
from assembler.differences import Gap
from tests.unit.assembler import made_prompts

texts = st.text(alphabet="ab é中\n", max_size=3000)


@given(texts, texts, texts)
@settings(deadline=None)
def test_the_common_length_is_that_of_a_walk(head: str, one: str, other: str) -> None:
    one, other = "x" + head + one, head + other
    expected = next(
        (at for at in range(min(len(one) - 1, len(other))) if one[at + 1] != other[at]), min(len(one) - 1, len(other))
    )
    assert differences.common_length(one, 1, other, 0) == expected


def gaps(old: str, new: str, *, are_whole: bool = True) -> list[Gap] | None:
    """Where the texts differ; None where they are not of one pattern."""
    found = differences.compared(old, new, are_whole=are_whole)
    return found.gaps if found.parting is None else None


def pattern(chance: random.Random, values: int) -> list[str]:
    """Stretches of text that values stand between, each long enough to be known again."""
    return ["".join(made_prompts.system(chance, chance.randint(1, 6))) for _ in range(values + 1)]


def filled(stretches: list[str], values: list[str]) -> str:
    return "".join(part for pair in zip(stretches, [*values, ""], strict=True) for part in pair)


def test_gaps_are_where_values_differ_and_nowhere_else() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        stretches = pattern(chance, chance.randint(1, 6))
        old, new = (
            filled(stretches, [f"<{chance.getrandbits(chance.choice([4, 40, 200])):x}>" for _ in stretches[1:]])
            for _ in range(2)
        )
        found = gaps(old, new)
        assert found is not None
        assert differences.are_alike(old, new)
        place = old_place = 0
        for gap in found:
            assert old[old_place : gap.old_start] == new[place : gap.start]
            assert old[gap.old_start : gap.old_end] != new[gap.start : gap.end]
            old_place, place = gap.old_end, gap.end
        assert old[old_place:] == new[place:]
        assert sum(gap.end - gap.start for gap in found) < 60 * len(stretches)


def test_texts_of_other_patterns_have_no_gaps_but_are_other_texts() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        old, new = ("You must be kind. " + "".join(made_prompts.system(chance, 12)) for _ in range(2))
        assert gaps(old, new) is None


def test_a_value_at_either_end_and_one_that_is_left_out_are_gaps() -> None:
    rest = " and this is the rest of a text"
    for old, new, gap in (
        ("4711" + rest, "12" + rest, (0, 4, 0, 2)),
        ("see 4711\n\n", "see 12\n\n", (4, 8, 4, 6)),
        ("see 4711 then" + rest, "see then" + rest, (4, 9, 4, 4)),
        ("see then" + rest, "see 4711 then" + rest, (4, 4, 4, 9)),
    ):
        assert gaps(old, new) == [gap]


def test_texts_begin_alike_where_a_value_is_what_differs_first() -> None:
    around = "You are a helper of {}, and the rest of it is about {}."
    documents = "river " * 200, "lantern " * 200
    for values, expected in (
        (("2026-11-30", "2026-12-01"), True),
        (("f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "a3bb189e-8bf9-3888-9912-ace4e6543002"), True),
        (("2026-11-30", "Ada"), False),
        (("Béla", "Ada"), False),
    ):
        old, new = (around.format(*each) for each in zip(values, documents, strict=True))
        assert differences.begin_alike(old, new) == expected, values


def test_texts_that_were_cut_off_need_not_end_together() -> None:
    text = "You are a helper. Number {} is yours. " + "Be kind to all who ask. " * 8
    old, new = text.format(9)[:100], text.format(10_000)[:100]
    assert gaps(old, new, are_whole=False) == [(25, 26, 25, 30)]
    assert gaps(old, new) is None


def test_texts_that_end_in_other_ways_are_not_of_one_pattern() -> None:
    assert gaps("You are a helper of", "You are a helper of a shop") is None
    assert gaps("You are a helper of Ada", "You are a helper of Béla") is None


def test_a_long_stretch_and_many_places_are_no_values() -> None:
    around = "You are a helper, and kind to all who ask. {} Answer in two sentences."
    assert gaps(around.format("x" * 200), around.format("y" * 200)) is None
    many = ["Be kind to all who ask you for help. "] * 18
    assert gaps(filled(many, ["1 "] * 17), filled(many, ["2 "] * 17)) is None
    few = many[:17]
    assert len(gaps(filled(few, ["1 "] * 16), filled(few, ["2 "] * 16)) or ()) == 16


def test_values_on_lines_of_their_own_are_gaps_however_long_they_are_together() -> None:
    chance = random.Random(5)
    for count in range(1, 10):
        lines = "".join(f"\n{word}: {{}}" for word in made_prompts.WORDS[:count])
        around = f"You are a helper.{lines}\nBe kind to all who ask."
        old, new = (around.format(*(uuid.UUID(int=chance.getrandbits(128)) for _ in range(count))) for _ in range(2))
        found = gaps(old, new)
        assert found is not None
        assert found[0].start == new.index(": ") + 2
        assert new[found[-1].end :] == "\nBe kind to all who ask."


def test_where_two_texts_part_is_told_with_the_gaps_before() -> None:
    around = "It is {}. You are a helper, and kind to all who ask. {}"
    old, new = around.format("10:15", "river " * 90), around.format("11:20", "lantern " * 90)
    (gap,), parting = differences.compared(old, new, are_whole=True)
    assert (gap, parting) == ((6, 11, 6, 11), new.index("lantern"))


@given(st.text(max_size=400), st.text(max_size=400), st.booleans())
@settings(deadline=None)
def test_any_two_texts_are_compared_without_fail(old: str, new: str, are_whole: bool) -> None:
    found = differences.compared(old, new, are_whole=are_whole)
    differences.are_alike(old, new)
    if found == ([], None) and are_whole:
        assert old == new
