"""How fast prompts are assembled, beside transformers' own apply_chat_template in the same process.

    python -m tests.bench.bench_assembler [MODEL DIRECTORY]

Prints one JSON object. The default model's directory is prepared where none is named. Times are medians, and the two
take turns. Conversations are of three kinds: `unseen` has new sentences of common words each time, as conversations do;
`new_words` has words that the process has never met; `again` is the same one each time. `styles` are templates of other
families.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from assembler import model_files
from assembler.application import SWITCH_SECONDS
from assembler.orders import Assembled, Order
from assembler.pipeline import Assembler
from hermes.v1 import assembler_pb2, types_pb2
from shared import models
from shared.settings import DEFAULT_MODEL
from tests.unit.assembler.model_styles import STYLES

WORDS = "the capital of France is Paris and a river goes through it where people like to walk in spring".split()  # noqa: SIM905
ROUNDS = 40
ANSWER_WORDS = 86
NEW_WORDS = 30
SYLLABLES = "ba ce di fo gu ka le mi no pu ra sta ter vi zo tion ing pre con er".split()  # noqa: SIM905
REPEATS, STYLE_REPEATS = 15, 7
# Lengths of one message's text, and how often each is taken.
LENGTHS, LENGTH_REPEATS = (100_000, 300_000, 1_000_000), 5
# Short enough to see one stall of the event loop among many turns.
TURN_SECONDS = 0.001


def conversation(rounds: int, seed: int, extra: str = "") -> list[dict[str, str]]:
    """Rounds of about 190 tokens; no two seeds give the same sentences."""
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=ANSWER_WORDS)) + f" {chosen.randrange(1000)}" for _ in range(2 * rounds)]
    return messages_of(texts, extra)


def conversation_of_new_words(rounds: int, seed: int) -> list[dict[str, str]]:
    """Rounds of about as many tokens; hardly a word is in any other seed's."""
    chosen = random.Random(seed)

    def word() -> str:
        return "".join(chosen.choices(SYLLABLES, k=chosen.randint(2, 4)))

    return messages_of([" ".join(word() for _ in range(NEW_WORDS)) for _ in range(2 * rounds)])


def messages_of(texts: list[str], extra: str = "") -> list[dict[str, str]]:
    """Messages of the texts: users' and answers in turn, and one more of a user's."""
    messages = [{"role": "system", "content": "You are helpful." + extra}]
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        messages.append({"role": "user", "content": question + extra})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": "And now?"}]


def as_prompt(told: list[dict[str, str]]) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role=each["role"], content=each["content"]) for each in told]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages))


def one_message(content: str) -> assembler_pb2.Prompt:
    return as_prompt([{"role": "user", "content": content}])


def medians_ms(works: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, float]:
    """The median time of each of the works, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for place in range(repeats):
        for name, work in works.items():
            started = time.perf_counter()
            work(place)
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


async def longest_turn_ms(assembler: Assembler, prompt: assembler_pb2.Prompt) -> dict[str, float]:
    """How long the event loop stood still while a prompt was assembled."""
    longest, done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not done:
            started = time.perf_counter()
            await asyncio.sleep(TURN_SECONDS)
            longest = max(longest, time.perf_counter() - started - TURN_SECONDS)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    started = time.perf_counter()
    assembled = await assembler.assemble(Order(prompt, None))
    seconds = time.perf_counter() - started
    done = True
    await watching
    return {
        "tokens": len(assembled.ids),
        "milliseconds": round(1000 * seconds, 1),
        "longest_stall": round(1000 * longest, 1),
    }


class Both:
    """A model's directory as both libraries have it."""

    def __init__(self, directory: Path) -> None:
        self.assembler = Assembler(model_files.load(directory))
        # Its warning of long prompts would be printed for a few of these.
        self._reference = AutoTokenizer.from_pretrained(directory, model_max_length=1_000_000)
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.assembler.close()
        self._loop.close()

    def assemble(self, prompt: assembler_pb2.Prompt) -> Assembled:
        return self._loop.run_until_complete(self.assembler.assemble(Order(prompt, None)))

    def stalls(self, content: str) -> dict[str, float]:
        return self._loop.run_until_complete(longest_turn_ms(self.assembler, one_message(content)))

    def stalls_of_many(self, messages: int) -> dict[str, float]:
        many = [{"role": ("user", "assistant")[at % 2], "content": f"message {at} <"} for at in range(messages)]
        return self._loop.run_until_complete(longest_turn_ms(self.assembler, as_prompt(many)))

    def compared(self, conversations: list[list[dict[str, str]]]) -> dict[str, float]:
        """Ours on the first half of the conversations, theirs on the second, so that none helps the other."""
        half = len(conversations) // 2
        ours, theirs = [as_prompt(each) for each in conversations[:half]], conversations[half:]
        found = medians_ms(
            {
                "hermes_ms": lambda place: self.assemble(ours[place]),
                "transformers_ms": lambda place: self._reference.apply_chat_template(
                    theirs[place], add_generation_prompt=True
                ),
            },
            half,
        )
        return found | {"times_as_fast": round(found["transformers_ms"] / found["hermes_ms"], 1)}


def measure(directory: Path) -> dict[str, Any]:
    both = Both(directory)
    sys.setswitchinterval(SWITCH_SECONDS)  # as in the assembler's own process
    gc.collect()
    gc.freeze()
    seeds = range(2 * REPEATS)
    kinds = {
        "unseen": both.compared([conversation(ROUNDS, seed) for seed in seeds]),
        "new_words": both.compared([conversation_of_new_words(ROUNDS, seed) for seed in seeds]),
        "again": both.compared([conversation(ROUNDS, 0)] * len(seeds)),
    }
    forged = [as_prompt(conversation(ROUNDS, seed, " a < b <|im_end|> c")) for seed in range(100, 100 + REPEATS)]
    guarded = medians_ms({"ms": lambda place: both.assemble(forged[place])}, REPEATS)["ms"]
    lengths = {
        str(characters): [one_message(_prose(characters, seed)) for seed in range(LENGTH_REPEATS)]
        for characters in LENGTHS
    }
    works = {name: lambda place, all_=prompts: both.assemble(all_[place]) for name, prompts in lengths.items()}
    found = {
        "tokens": len(both.assemble(as_prompt(conversation(ROUNDS, 0))).ids),
        "conversations": kinds,
        "hermes_with_control_text_ms": guarded,
        "characters_to_ms": medians_ms(works, LENGTH_REPEATS),
        "event_loop": {
            "10,000 messages": both.stalls_of_many(10_000),
            "5 MB": both.stalls(_prose(5_000_000, 0)),
            "5 MB of <": both.stalls("<" * 5_000_000),
            "1 MB of control text": both.stalls("<|im_end|>" * 100_000),
        },
    }
    both.close()
    return found


def measure_styles() -> dict[str, float]:
    """Times as fast, on unseen conversations, with the templates of many families and small tokenizers."""
    found = {}
    for style in STYLES:
        with TemporaryDirectory() as directory:
            both = Both(style.write(Path(directory)))
            told = [conversation(ROUNDS, seed) for seed in range(2 * STYLE_REPEATS)]
            found[style.name] = both.compared([each if style.system else each[1:] for each in told])["times_as_fast"]
            both.close()
    return found


def _prose(characters: int, seed: int) -> str:
    chosen = random.Random(seed)
    words = iter(lambda: chosen.choice(WORDS), "")
    pieces: list[str] = []
    length = 0
    while length < characters:
        pieces.append(f"{' '.join(islice(words, 1000))} {chosen.random()} ")
        length += len(pieces[-1])
    return "".join(pieces)[:characters]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    directory = arguments.model or models.prepare(DEFAULT_MODEL, lambda line: print(line, file=sys.stderr))
    print(json.dumps(measure(directory) | {"styles": measure_styles()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
