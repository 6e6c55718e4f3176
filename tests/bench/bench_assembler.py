"""How fast prompts are assembled, beside transformers' own apply_chat_template in the same process.

    python -m tests.bench.bench_assembler [MODEL DIRECTORY]

Prints one JSON object. The default model's directory is prepared where none is named.
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
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from assembler import model_files
from assembler.application import SWITCH_SECONDS
from assembler.pipeline import Assembler, Order
from hermes.v1 import assembler_pb2, types_pb2
from shared import models
from shared.settings import DEFAULT_MODEL

WORDS = "the capital of France is Paris and a river goes through it where people like to walk in spring".split()  # noqa: SIM905
ROUNDS = 40
ANSWER_WORDS = 70
REPEATS = 15
# Short enough to see one stall of the event loop among many turns.
TURN_SECONDS = 0.001


def conversation(rounds: int, seed: int, extra: str = "") -> list[dict[str, str]]:
    """Rounds of about 190 tokens; no two seeds give the same text, so that no cache of the tokenizer's helps."""
    chosen = random.Random(seed)
    text = [" ".join(chosen.choices(WORDS, k=ANSWER_WORDS)) + f" {chosen.randrange(1000)}" for _ in range(2 * rounds)]
    told = [{"role": "system", "content": "You are helpful." + extra}]
    for place in range(rounds):
        told.append({"role": "user", "content": text[2 * place] + extra})
        told.append({"role": "assistant", "content": text[2 * place + 1]})
    return [*told, {"role": "user", "content": "And now?"}]


def as_prompt(told: list[dict[str, str]]) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role=each["role"], content=each["content"]) for each in told]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages))


def median_ms(work: Callable[[int], Any]) -> float:
    times = []
    for place in range(REPEATS):
        started = time.perf_counter()
        work(place)
        times.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


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


def measure(directory: Path) -> dict[str, Any]:
    files = model_files.load(directory)
    assembler = Assembler(files)
    reference = AutoTokenizer.from_pretrained(directory)
    loop = asyncio.new_event_loop()
    sys.setswitchinterval(SWITCH_SECONDS)  # as in the assembler's own process
    gc.collect()
    gc.freeze()

    def assemble(told: list[dict[str, str]]) -> Any:
        return loop.run_until_complete(assembler.assemble(Order(as_prompt(told), None)))

    plain = [as_prompt(conversation(ROUNDS, seed)) for seed in range(REPEATS)]
    forged = [as_prompt(conversation(ROUNDS, seed, " a < b <|im_end|> c")) for seed in range(100, 100 + REPEATS)]
    told = [conversation(ROUNDS, seed) for seed in range(200, 200 + REPEATS)]
    ours = median_ms(lambda place: loop.run_until_complete(assembler.assemble(Order(plain[place], None))))
    guarded = median_ms(lambda place: loop.run_until_complete(assembler.assemble(Order(forged[place], None))))
    theirs = median_ms(lambda place: reference.apply_chat_template(told[place], add_generation_prompt=True))
    lengths = {}
    for characters in (10_000, 100_000, 1_000_000):
        prompt = as_prompt([{"role": "user", "content": _prose(characters)}])
        started = time.perf_counter()
        loop.run_until_complete(assembler.assemble(Order(prompt, None)))
        lengths[characters] = round(1000 * (time.perf_counter() - started), 2)
    many = [{"role": ("user", "assistant")[place % 2], "content": f"message {place} <"} for place in range(10_000)]
    stalls = {
        "10,000 messages": loop.run_until_complete(longest_turn_ms(assembler, as_prompt(many))),
        "5 MB": loop.run_until_complete(
            longest_turn_ms(assembler, as_prompt([{"role": "user", "content": _prose(5_000_000)}]))
        ),
        "5 MB of <": loop.run_until_complete(
            longest_turn_ms(assembler, as_prompt([{"role": "user", "content": "<" * 5_000_000}]))
        ),
        "1 MB of control text": loop.run_until_complete(
            longest_turn_ms(assembler, as_prompt([{"role": "user", "content": "<|im_end|>" * 100_000}]))
        ),
    }
    tokens = len(assemble(told[0]).ids)
    assembler.close()
    loop.close()
    return {
        "tokens": tokens,
        "hermes_ms": ours,
        "hermes_with_control_text_ms": guarded,
        "transformers_ms": theirs,
        "times_as_fast": round(theirs / ours, 1),
        "characters_to_ms": lengths,
        "event_loop": stalls,
    }


def _prose(characters: int) -> str:
    chosen = random.Random(characters)
    text = ""
    while len(text) < characters:
        text += " ".join(chosen.choices(WORDS, k=1000)) + f" {chosen.random()} "
    return text[:characters]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    directory = arguments.model or models.prepare(DEFAULT_MODEL, lambda line: print(line, file=sys.stderr))
    print(json.dumps(measure(directory), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
