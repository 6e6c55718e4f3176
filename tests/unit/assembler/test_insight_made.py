"""What insight finds in system prompts made by chance, and what it keeps silent about."""

import random
from collections.abc import Iterator

import pytest

from assembler.findings import Finding
from assembler.model_files import ModelFiles
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from tests.unit.assembler import made_prompts
from tests.unit.assembler.prompted import dynamic


@pytest.fixture(scope="module")
def assembler(files: ModelFiles) -> Iterator[Assembler]:
    made = Assembler(files)
    yield made
    made.close()


async def test_values_planted_in_1000_system_prompts_are_found_and_named(assembler: Assembler) -> None:
    """Three conversations of each: two tell enough of what changes by nature, of a short number it takes three."""
    chance, use = random.Random(7), CacheUse("planted")
    missed, wrong = [], []
    for number in range(1000):
        name = list(made_prompts.VALUES)[number % 5]
        pattern = made_prompts.planted(chance, chance.random())
        value = made_prompts.VALUES[name](chance)
        found: list[Finding] = []
        for _ in range(3):
            text = pattern.format(now := value())
            found = await dynamic(assembler, use, ("system", text), ("user", made_prompts.question(chance)))
        if len(found) != 1:
            missed.append((name, pattern, now, found))
            continue
        expected = {"counter": "number", "time": "time", "hexadecimal id": "id"}.get(name, name)
        quoted = text[found[0].start : found[0].end]
        if expected not in found[0].message or now not in quoted or found[0].message_index != 0:
            wrong.append((name, now, found[0]))
    assert (missed, wrong) == ([], [])


async def test_values_on_lines_of_their_own_are_found_each_of_them(assembler: Assembler) -> None:
    chance = random.Random(11)
    missed = []
    for number in range(300):
        use = CacheUse(f"listed {number}")
        made = [chance.choice(list(made_prompts.VALUES.values()))(chance) for _ in range(chance.randint(2, 7))]
        pattern = made_prompts.listed(chance, len(made))
        for _ in range(3):
            values = [value() for value in made]
            text = pattern.format(*values)
            found = await dynamic(assembler, use, ("system", text), ("user", made_prompts.question(chance)))
        quoted = [text[each.start : each.end] for each in found]
        if not (len(found) == len(values) and all(one in other for one, other in zip(values, quoted, strict=True))):
            missed.append((values, quoted))
    assert missed == []


@pytest.mark.parametrize("kind", ["date", "UUID", "hexadecimal id"])
async def test_a_value_before_a_long_text_that_changes_is_told_with_what_is_alike_in_between(
    assembler: Assembler, kind: str
) -> None:
    chance = random.Random(12)
    for number in range(100):
        use, value = CacheUse(f"{kind} beside documents {number}"), made_prompts.VALUES[kind](chance)
        rules = "".join(made_prompts.system(chance, chance.randint(3, 30)))
        for _ in range(2):
            text = f"Now: {(now := value())}. {rules}\n{made_prompts.documents(chance)}"
            found = await dynamic(assembler, use, ("system", text), ("user", made_prompts.question(chance)))
        assert [text[each.start : each.end] for each in found] == [now], text
        alike = len(assembler.files.tokenizer.encode(rules))
        assert alike - 5 <= found[0].tokens <= alike + 25, text


def retrieved(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Prompts with the same rules, and with other documents behind them each time."""
    rules = "".join(made_prompts.system(chance))
    for _ in range(40):
        yield [("system", f"{rules}\n{made_prompts.documents(chance)}"), ("user", made_prompts.question(chance))]


def worked_on(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """A prompt of which another sentence is written anew before each time that it is tried."""
    parts = [made_prompts.sentence(chance) for _ in range(40)]
    for place in chance.sample(range(40), 40):
        parts[place] = made_prompts.sentence(chance)
        yield [("system", " ".join(parts)), ("user", made_prompts.question(chance))]


def tenants(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Prompts of several applications that have phrases in common, each asked again and again."""
    phrases = made_prompts.system(chance, 12)
    prompts = []
    for _ in range(chance.randint(2, 20)):
        parts = [*chance.sample(phrases, 6), *made_prompts.system(chance, chance.randint(2, 5))]
        chance.shuffle(parts)
        prompts.append(f"You work for {chance.choice(made_prompts.WORDS)}. {''.join(parts)}")
    for _ in range(40):
        yield [("system", chance.choice(prompts)), ("user", made_prompts.question(chance))]


def growing(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Conversations that go on, side by side."""
    system = "".join(made_prompts.system(chance))
    talks = [[("system", system), ("user", made_prompts.question(chance))] for _ in range(4)]
    for _ in range(40):
        talk = chance.choice(talks)
        yield list(talk)
        talk += [("assistant", made_prompts.sentence(chance)), ("user", made_prompts.question(chance))]


TRIED_OUT = [
    ("at most 3 sentences", "at most 5 sentences"),
    ("100 words", "200 words"),
    ("10000 tokens", "20000 tokens"),
    ("the hours, 9:00 to 18:00", "the hours, 10:00 to 19:30"),
    ("what is open on Mon", "what is open on Sunday"),
    ("version 1.2.30", "version 1.2.31"),
    ("the host 10.0.20.65", "the host 10.0.20.66"),
    ("ja", "nein"),
]


def tried_out(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Two forms of one prompt that differ in a number, a time of day or in words."""
    parts = made_prompts.system(chance)
    forms = chance.choice(TRIED_OUT)
    place = chance.randrange(len(parts))
    for _ in range(40):
        form = f"Keep to {chance.choice(forms)}. "
        yield [("system", "".join([*parts[:place], form, *parts[place:]])), ("user", made_prompts.question(chance))]


def edited(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """A prompt with dates and ids in it that stay, of which another version is deployed once."""
    parts = [*made_prompts.system(chance), f"Known until {made_prompts.moment(chance):%Y-%m-%d}. Key a81f3c9d00b7. "]
    chance.shuffle(parts)
    for _ in range(20):
        yield [("system", "".join(parts)), ("user", made_prompts.question(chance))]
    parts[chance.randrange(len(parts))] = made_prompts.sentence(chance)
    for _ in range(20):
        yield [("system", "".join(parts)), ("user", made_prompts.question(chance))]


@pytest.mark.parametrize(
    "made", [tenants, growing, tried_out, edited, retrieved, worked_on], ids=lambda made: made.__name__
)
async def test_1000_prompts_of_stable_applications_are_nothing_to_tell(assembler: Assembler, made) -> None:
    told = []
    for seed in range(25):
        chance, use = random.Random(seed), CacheUse(f"{made.__name__} {seed}")
        for turns in made(chance):
            told += await dynamic(assembler, use, *turns)
    assert told == []
