"""Whether answers come back exact: how much of the next turn's prompt the prefix tree holds, with the real model.

    python -m tests.bench.bench_answers [MODEL DIRECTORY]

Prints one JSON object. Answers of 40 tokens are sampled at temperature 0.9 from the whole vocabulary, several to a
prompt; each is gone on with once. `reached`: of the next turns, those whose cached tokens reach the answer's end (its
last token has no keys and values yet, and what fills less of a block than `min_copy_tokens` is not copied).
`retokenized`: those in whose prompts the answer, tokenized anew, has other ids. `lost_tokens`: the share of all
answers' tokens that is behind the first of those. `finish_seconds`: from an answer's last token to its end, as the
caller sees it, with the assembler's cache and without one.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hermes.answers import Sample
from hermes.client import AsyncClient
from hermes.messages import Message
from shared import models
from shared.settings import DEFAULT_MODEL
from tests.service.services import ServiceProcess

ANSWERS, SAMPLES, TOKENS = 80, 8, 40
# As the executor's settings have it.
MIN_COPY_TOKENS = 4
QUESTIONS = (
    "Write a letter to a friend in Zürich.",
    "Tell me about rivers, with numbers.",
    "Invent seven names for a café.",
    "Explain recursion in Python, with code.",
    "Write a poem about winter.",
)
SYSTEM = "You are a helpful assistant. Answer in whole sentences."


class Outcome(NamedTuple):
    """reached: whether the tree held all of an answer. same: tokens of it that are the same when tokenized anew."""

    reached: bool
    tokens: int
    same: int


@contextmanager
def pair(model: Path, directory: Path, *settings: str) -> Iterator[str]:
    """Both services; the assembler's address."""
    executor = ServiceProcess("executor", "--model", str(model), "--kv-memory", "512MiB")
    try:
        assembler = ServiceProcess(
            "assembler", "--model", str(model), "--executor", executor.address,
            "--cache-directory", str(directory), *settings,
        )  # fmt: skip
        try:
            yield assembler.address
        finally:
            assembler.stop()
    finally:
        executor.stop()


async def outcomes(address: str, answers: int) -> list[Outcome]:
    async with AsyncClient(address, timeout=600) as client:
        found: list[Outcome] = []
        for seed, question in zip(range(answers // SAMPLES), itertools.cycle(QUESTIONS), strict=False):
            asked = [Message("system", SYSTEM), Message("user", f"{question} ({seed})")]
            answer = await client.chat(
                asked, temperature=0.9, top_k=0, top_p=1.0, max_tokens=TOKENS, n=SAMPLES, seed=seed
            )
            prompt_tokens = answer.usage.prompt_tokens
            found += [await gone_on(client, asked, sample, prompt_tokens) for sample in answer.samples]
        return found


async def gone_on(client: AsyncClient, asked: list[Message], sample: Sample, prompt_tokens: int) -> Outcome:
    """What the next turn of a conversation has of an answer."""
    ids = list(sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids)
    messages = [*asked, Message("assistant", sample.text), Message("user", "Go on, please.")]
    fresh = (await client.assemble(messages, cache_read=False, cache_write=False)).token_ids[prompt_tokens:]
    same = next((place for place, token in enumerate(ids) if place >= len(fresh) or fresh[place] != token), len(ids))
    usage = (await client.chat(messages, max_tokens=1)).usage
    reached = usage.cached_tokens > prompt_tokens + len(ids) - 1 - MIN_COPY_TOKENS
    return Outcome(reached, len(ids), same)


async def ends(address: str, turns: int) -> list[float]:
    """Seconds from the last token to the end of each answer, in a conversation that grows."""
    async with AsyncClient(address, timeout=600) as client:
        messages, seconds = [Message("system", SYSTEM)], []
        for turn in range(turns):
            messages.append(Message("user", f"{turn}. {QUESTIONS[turn % len(QUESTIONS)]}"))
            last = 0.0
            async with client.stream(messages, temperature=0, max_tokens=8) as stream:
                async for _ in stream.deltas():
                    last = time.perf_counter()
            seconds.append(time.perf_counter() - last)
            messages.append(Message("assistant", stream.answer.text))
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    model = options.model or models.prepare(DEFAULT_MODEL, lambda line: print(line, file=sys.stderr))
    with TemporaryDirectory() as directory:
        with pair(model, Path(directory)) as address:
            found = asyncio.run(outcomes(address, options.answers))
            kept = asyncio.run(ends(address, options.turns))
        with pair(model, Path(directory), "--no-cache") as address:
            unkept = asyncio.run(ends(address, options.turns))
    tokens = sum(each.tokens for each in found)
    print(
        json.dumps(
            {
                "answers": len(found),
                "reached": sum(each.reached for each in found) / len(found),
                "retokenized": sum(each.same < each.tokens for each in found) / len(found),
                "lost_tokens": sum(each.tokens - each.same for each in found) / tokens,
                "finish_seconds": {"kept": statistics.median(kept), "without_cache": statistics.median(unkept)},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
