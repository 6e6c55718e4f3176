"""What half-precision weights cost: perplexity, and how often the likeliest token is that of the exact weights.

    python -m tests.bench.bench_quality

The text is the Python language reference as `pydoc` carries it, which every CPython has. The same tokens go through
three forwards: float32 weights as they are; weights rounded to half precision in dense linears; and those weights
packed, a few tokens a step. Then the two last are mixed, as in service: keys and values from one, logits by the other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import tokenizers
import torch
from torch import Tensor

from executor.attention import AttentionCall, AttentionPlan
from executor.batch import Batch
from executor.model import Model
from shared.models import prepare
from shared.settings import DEFAULT_MODEL

TOPICS = ("assignment", "class", "objects", "exceptions", "execmodel", "function", "for", "import")
WINDOW = 512
CPU = torch.device("cpu")


class Scores(NamedTuple):
    """What a forward makes of the text: each token's logits, but for those without one after them."""

    logits: Tensor
    """`[tokens, vocab]`."""
    targets: Tensor
    """`[tokens]`: the tokens that come next."""

    @property
    def perplexity(self) -> float:
        return math.exp(float(torch.nn.functional.cross_entropy(self.logits, self.targets)))

    def agreement(self, other: Scores) -> float:
        """How often the likeliest token is the same."""
        return float((self.logits.argmax(-1) == other.logits.argmax(-1)).float().mean())

    def largest_difference(self, other: Scores) -> float:
        """Of two logits for the same token in the same place."""
        return float((self.logits - other.logits).abs().max())

    def difference(self, other: Scores) -> float:
        """Of all logits, as a share of their norm."""
        return float((self.logits - other.logits).norm() / self.logits.norm())


class Reader:
    """Reads windows of text through a model, some tokens a step."""

    def __init__(self, model: Model) -> None:
        layout = model.layout
        shape = (WINDOW, layout.kv_heads, layout.head_dim)
        self.model = model
        self.keys = [torch.zeros(shape) for _ in range(layout.layers)]
        self.values = [torch.zeros(shape) for _ in range(layout.layers)]

    def read(self, windows: Sequence[Sequence[int]], steps: Sequence[int]) -> Scores:
        """Reads each window in steps of so many tokens, over and over in that order."""
        logits = [torch.cat(list(self._window(window, steps)))[:-1] for window in windows]
        targets = [torch.tensor(window[1:]) for window in windows]
        return Scores(torch.cat(logits), torch.cat(targets))

    def _window(self, window: Sequence[int], steps: Sequence[int]) -> list[Tensor]:
        parts, start = [], 0
        while start < len(window):
            end = min(start + steps[len(parts) % len(steps)], len(window))
            mask = torch.full((end - start, end), float("-inf")).triu_(start + 1)
            places = torch.arange(start, end)
            plan = AttentionPlan(places, [AttentionCall(slice(None), slice(0, end), mask=mask)])
            batch = Batch(torch.tensor([window[start:end]]), places[None], torch.arange(end - start), plan)
            parts.append(self.model.forward(batch, self.keys, self.values))
            start = end
        return parts


def text() -> str:
    return "\n".join(topics.topics[name] for name in TOPICS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--windows", type=int, default=5, help=f"of {WINDOW} tokens each")
    arguments = parser.parse_args()
    directory: Path = prepare(arguments.model, print)
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text()).ids
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(arguments.windows)]
    exact = Reader(Model.load(directory, CPU, torch.float32)).read(windows, [WINDOW])
    model = Model.load(directory, CPU, torch.float32, "fp16")
    few = model.packed_rows
    reader = Reader(model)
    rounded = reader.read(windows, [WINDOW])
    packed = reader.read(windows, [few])
    mixed = reader.read(windows, [WINDOW // 2, few])
    print(f"\n{len(exact.targets)} tokens of text, {few} a step where linears are packed\n")
    print(f"{'':34}{'perplexity':>12}{'same top-1':>12}{'logits off by':>15}{'at most':>10}")
    for name, scores, against in (
        ("float32", exact, exact),
        ("rounded, dense: to float32", rounded, exact),
        ("rounded, packed: to float32", packed, exact),
        ("rounded, packed: to dense", packed, rounded),
        ("rounded, both in turn: to dense", mixed, rounded),
    ):
        print(
            f"{name:34}{scores.perplexity:12.4f}{scores.agreement(against):12.4f}"
            f"{scores.difference(against):15.1e}{scores.largest_difference(against):10.1e}"
        )


if __name__ == "__main__":
    main()
