"""System prompts made by chance, and values such as applications write into them."""

import random
import string
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta

SUBJECTS = ["You", "The assistant", "Every answer", "A good reply", "Our support desk", "Das System", "助手", "L'agent"]
VERBS = ["must", "should", "may", "never has to", "is asked to", "prefers to", "soll", "应该", "doit"]
ACTS = [
    "answer in {n} sentences", "quote the manual of version {n}.{m}", "be kind to customers", "decline medical advice",
    "use metric units", "write JSON such as {{\"id\": {n}, \"ok\": true}}", "say when it does not know", "think step by step",
    "translate into Norwegian", "keep the order of lists", "mention the opening hours, {n} to {m}", "stay on the topic",
    "begin with a greeting", "avoid the words \"{w}\" and \"{v}\"", "offer {n} options", "refer to ticket rules §{n}",
    "call `lookup_{w}(id)` first", "用简短的句子回答", "round to {m} digits", "follow the policy of 2024-0{m}-1{m}",
]  # fmt: skip
WORDS = (  # noqa: SIM905 - a list of them would be a page
    "river bicycle lantern market violet harbour engine pepper winter copper garden signal velvet anchor cinder "
    "meadow packet ribbon saddle timber umbrella walnut yonder zephyr basket candle"
).split()  # fmt: skip
QUESTIONS = [
    "What is the capital of France?", "How do I brake?", "Wie spät ist es?", "请介绍一下你自己", "Write a poem.", "hi",
    "Tell me of the harbour.", "Is it open?", "Can I return a lantern?", "Why?", "Summarize my order, please.",
]  # fmt: skip


def sentence(chance: random.Random) -> str:
    act = chance.choice(ACTS).format(
        n=chance.randint(1, 20), m=chance.randint(1, 9), w=chance.choice(WORDS), v=chance.choice(WORDS)
    )
    more = " ".join(chance.choices(WORDS, k=chance.randint(0, 8)))
    return f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {act}{' in the ' + more if more else ''}."


def system(chance: random.Random, sentences: int | None = None) -> list[str]:
    """Sentences, some of them in paragraphs of their own."""
    count = chance.randint(2, 30) if sentences is None else sentences
    return [sentence(chance) + chance.choice([" ", " ", " ", "\n", "\n\n"]) for _ in range(count)]


def question(chance: random.Random) -> str:
    return f"{chance.choice(QUESTIONS)} {' '.join(chance.choices(WORDS, k=chance.randint(0, 5)))}".strip()


def moment(chance: random.Random) -> datetime:
    return datetime(2024, 1, 1) + timedelta(seconds=chance.randrange(3 * 365 * 86_400))  # noqa: DTZ001


def _date(chance: random.Random) -> Callable[[], str]:
    written = chance.choice(
        ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%B %d, %Y", "%A, %d %B %Y", "%d %b %Y", "%Y年%m月%d日", "%Y/%m/%d"]
    )
    return lambda: moment(chance).strftime(written)


def _time(chance: random.Random) -> Callable[[], str]:
    written = chance.choice(
        ["%H:%M", "%H:%M:%S", "%I:%M %p", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S.%f", "%a, %d %b %Y %H:%M:%S GMT"]
    )
    return lambda: moment(chance).strftime(written)


def _uuid(chance: random.Random) -> Callable[[], str]:
    return lambda: str(uuid.UUID(int=chance.getrandbits(128)))


def _counter(chance: random.Random) -> Callable[[], str]:
    numbers = iter(range(chance.choice([1, 8, 97, 2_041, 88_000]), 10**6))
    return lambda: str(next(numbers))


def _hex(chance: random.Random) -> Callable[[], str]:
    length = chance.choice([8, 12, 16, 32, 40])
    return lambda: "".join(chance.choices(string.hexdigits[:16], k=length))


VALUES = {"date": _date, "time": _time, "UUID": _uuid, "counter": _counter, "hexadecimal id": _hex}
AROUND = [
    "Today is {}. ", "({})", "Session: {}\n", "id={};", "当前：{}，", "[{}] ", "It is {} now, ", "<now>{}</now>\n", "{}\n",
    "Request #{}. ", "user-{} ", "\"value\": \"{}\", ",
]  # fmt: skip


def planted(chance: random.Random, place: float) -> str:
    """A system prompt with a hole for a value. place: from 0 for the beginning to 1 for the end."""
    parts = [each.replace("{", "{{").replace("}", "}}") for each in system(chance)]
    parts.insert(round(place * len(parts)), chance.choice(AROUND))
    return "".join(parts)


def listed(chance: random.Random, values: int) -> str:
    """A system prompt with holes for so many values, each on a line of its own among its sentences."""
    parts = [each.replace("{", "{{").replace("}", "}}") for each in system(chance)]
    lines = [f"{word}: {{}}" for word in chance.sample(WORDS, values)]
    parts.insert(chance.randint(0, len(parts)), "\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def documents(chance: random.Random) -> str:
    """What was retrieved for a question: texts with dates and ids in them, another number of them each time."""
    found = [
        f"[{number}] {chance.choice(list(VALUES.values()))(chance)()}: {''.join(system(chance, chance.randint(1, 6)))}"
        for number in range(1, chance.randint(2, 6))
    ]
    return "\n".join(["Documents:", *found])
