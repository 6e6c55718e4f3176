import random

from hypothesis import given, settings
from hypothesis import strategies as st

from assembler import differences
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
        gaps = differences.gaps(old, new, are_whole=True)
        assert gaps is not None
        assert differences.are_alike(old, new)
        place = old_place = 0
        for gap in gaps:
            assert old[old_place : gap.old_start] == new[place : gap.start]
            assert old[gap.old_start : gap.old_end] != new[gap.start : gap.end]
            old_place, place = gap.old_end, gap.end
        assert old[old_place:] == new[place:]
        assert sum(gap.end - gap.start for gap in gaps) < 60 * len(stretches)


def test_texts_of_other_patterns_have_no_gaps_but_are_other_texts() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        old, new = ("You must be kind. " + "".join(made_prompts.system(chance, 12)) for _ in range(2))
        assert differences.gaps(old, new, are_whole=True) is None


def test_a_value_at_either_end_and_one_that_is_left_out_are_gaps() -> None:
    rest = " and this is the rest of a text"
    for old, new, gap in (
        ("4711" + rest, "12" + rest, (0, 4, 0, 2)),
        ("see 4711\n\n", "see 12\n\n", (4, 8, 4, 6)),
        ("see 4711 then" + rest, "see then" + rest, (4, 9, 4, 4)),
        ("see then" + rest, "see 4711 then" + rest, (4, 4, 4, 9)),
    ):
        assert differences.gaps(old, new, are_whole=True) == [gap]


def test_texts_that_were_cut_off_need_not_end_together() -> None:
    text = "You are a helper. Number {} is yours. " + "Be kind to all who ask. " * 8
    old, new = text.format(9)[:100], text.format(10_000)[:100]
    assert differences.gaps(old, new, are_whole=False) == [(25, 26, 25, 30)]
    assert differences.gaps(old, new, are_whole=True) is None


def test_texts_that_end_in_other_ways_are_not_of_one_pattern() -> None:
    assert differences.gaps("You are a helper of", "You are a helper of a shop", are_whole=True) is None
    assert differences.gaps("You are a helper of Ada", "You are a helper of Béla", are_whole=True) is None


def test_a_long_stretch_and_many_places_are_no_values() -> None:
    around = "You are a helper, and kind to all who ask. {} Answer in two sentences."
    assert differences.gaps(around.format("x" * 200), around.format("y" * 200), are_whole=True) is None
    many = ["Be kind to all who ask you for help. "] * 10
    assert differences.gaps(filled(many, ["1 "] * 9), filled(many, ["2 "] * 9), are_whole=True) is None
    few = many[:9]
    assert len(differences.gaps(filled(few, ["1 "] * 8), filled(few, ["2 "] * 8), are_whole=True) or ()) == 8


@given(st.text(max_size=400), st.text(max_size=400), st.booleans())
@settings(deadline=None)
def test_any_two_texts_are_compared_without_fail(old: str, new: str, are_whole: bool) -> None:
    gaps = differences.gaps(old, new, are_whole=are_whole)
    differences.are_alike(old, new)
    if gaps == [] and are_whole:
        assert old == new
