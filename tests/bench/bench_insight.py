"""What insight costs a prompt, beside the assembling of that prompt and a fixed piece of Python.

    python -m tests.bench.bench_insight [MODEL DIRECTORY]

Prints one JSON object: medians of processor time in microseconds, for a system text of 500 tokens whose head was there
before (`known`), has another date in it each time (`dated`), or is another one each time (`other`), and for a megabyte
with another date in it each time (`megabyte`). `python` is sum(range(1000)), by which machines can be compared.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assembler import model_files
from assembler.orders import Order, Policies
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from hermes.v1 import assembler_pb2, types_pb2
from shared import models
from shared.settings import DEFAULT_MODEL
from tests.unit.assembler import made_prompts

PROMPTS = 400
LONG_PROMPTS = 20
CHARACTERS = 1900
MEGABYTE = 1_000_000


def prompt(system: str, place: int) -> assembler_pb2.Prompt:
    messages = [("system", system), ("user", f"Question {place}: what is it?")]
    return assembler_pb2.Prompt(
        chat=assembler_pb2.Chat(messages=[types_pb2.Message(role=role, content=text) for role, text in messages])
    )


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


async def medians(assemblers: dict[str, Assembler], name: str, systems: list[str]) -> dict[str, int]:
    """Microseconds of the event loop's thread for a prompt; the assemblers take turns."""
    took: dict[str, list[float]] = {each: [] for each in assemblers}
    for place, system in enumerate(systems):
        order = Order(prompt(system, place), None, cache=CacheUse(name))
        for each, assembler in assemblers.items():
            began = time.thread_time()
            await assembler.assemble(order)
            took[each].append(time.thread_time() - began)
    return {each: round(statistics.median(times) * 1e6) for each, times in took.items()}


async def measure(model: Path) -> dict[str, Any]:
    files = model_files.load(model)
    chance = random.Random(1)
    text, other = "".join(made_prompts.system(chance, 60)), "".join(made_prompts.system(chance, 12_000))
    middle = text.index(" ", CHARACTERS // 3)
    kinds = {
        "known": [text[:CHARACTERS]] * PROMPTS,
        "dated": [
            f"{text[:middle]} It is {made_prompts.moment(chance)}.{text[middle:CHARACTERS]}" for _ in range(PROMPTS)
        ],
        "other": ["".join(made_prompts.system(chance, 60))[:CHARACTERS] for _ in range(PROMPTS)],
        "megabyte": [f"It is {made_prompts.moment(chance)}. {other[:MEGABYTE]}" for _ in range(LONG_PROMPTS)],
    }
    found: dict[str, Any] = {"system_tokens": len(files.tokenizer.encode(text[:CHARACTERS]))}
    assemblers = {"with": Assembler(files), "without": Assembler(files, Policies(insight=False))}
    for kind, systems in kinds.items():
        found[kind] = await medians(assemblers, kind, systems)
    found["python"] = round(statistics.median(seconds_of(lambda: sum(range(1000))) for _ in range(PROMPTS)) * 1e6, 1)
    for assembler in assemblers.values():
        assembler.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or models.prepare(DEFAULT_MODEL, lambda line: print(line, file=sys.stderr))
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(measure(model)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
