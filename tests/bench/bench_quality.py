"""What half-precision weights cost: perplexity, and how often the likeliest token is that of the exact weights.

    make bench-quality

The text is the Python language reference as `pydoc` carries it, which every CPython has. The same tokens go through
float32 weights as they are, and through weights rounded to half precision: in dense linears, packed, a few tokens a
step, and on AMX tiles, where the CPU has those. Then the last are mixed, as in service: keys and values from one,
logits by the other. Logits are off by a share of their norm, and a single one by so much at most; what float32 alone is
off by, a few tokens at once against many, is the measure of what products of the same weights may be off by.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics

import tokenizers
import torch
from torch import Tensor

from executor.attention import AttentionCall, AttentionPlan
from executor.batch import Batch
from executor.model import Model
from executor.native import library, tiles
from executor.native.operators import NoKernelError
from executor.native.tiles import Tiles
from executor.tiling import Tiling
from shared.models import prepare
from shared.settings import DEFAULT_MODEL

TOPICS = ("assignment", "class", "objects", "exceptions", "execmodel", "function", "for", "import")
WINDOW = 512
FEW = 8  # tokens at once, where linears are packed
CPU = torch.device("cpu")


@dataclass
class Tally:
    """What a forward makes of the text, beside another that it is compared with; grows by the window."""

    tokens: int = 0
    surprise: float = 0.0
    """Of the tokens that came next, in nats."""
    agreed: int = 0
    squares: float = 0.0
    squares_off: float = 0.0
    most_off: float = 0.0

    def add(self, logits: Tensor, other: Tensor, targets: Tensor) -> None:
        """Takes a window's `[tokens, vocab]` logits by either forward, and the `[tokens]` that came next."""
        off = logits - other
        self.tokens += len(targets)
        self.surprise += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        self.agreed += int((logits.argmax(-1) == other.argmax(-1)).sum())
        self.squares += float(other.square().sum())
        self.squares_off += float(off.square().sum())
        self.most_off = max(self.most_off, float(off.abs().max()))

    def __str__(self) -> str:
        perplexity, share = math.exp(self.surprise / self.tokens), math.sqrt(self.squares_off / self.squares)
        return f"{perplexity:12.4f}{self.agreed / self.tokens:12.4f}{share:15.1e}{self.most_off:10.1e}"


class Reader:
    """Reads windows of text through a model, some tokens a step."""

    def __init__(self, model: Model) -> None:
        layout = model.layout
        shape = (WINDOW, layout.kv_heads, layout.head_dim)
        self.model = model
        self.keys = [torch.zeros(shape) for _ in range(layout.layers)]
        self.values = [torch.zeros(shape) for _ in range(layout.layers)]

    def read(self, window: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Reads a window in steps of so many tokens, over and over in that order; the logits of all but the last."""
        parts, start = [], 0
        while start < len(window):
            end = min(start + steps[len(parts) % len(steps)], len(window))
            mask = torch.full((end - start, end), float("-inf")).triu_(start + 1)
            places = torch.arange(start, end)
            plan = AttentionPlan(places, [AttentionCall(slice(None), slice(0, end), mask=mask)])
            batch = Batch(torch.tensor([window[start:end]]), places[None], torch.arange(end - start), plan)
            parts.append(self.model.forward(batch, self.keys, self.values))
            start = end
        return torch.cat(parts)[:-1]


def _tile(model: Model) -> str:
    """Gives a model products on AMX tiles, beyond FEW rows; returns how more than that are multiplied."""
    try:
        tiles.require_fit()
        place = library.built(library.tiles(), threading.Event())
        replace(Tiling.of(model.module, Tiles(place)), most_rows=FEW).apply(model.network)
    except NoKernelError as reason:
        print(f"no products on AMX tiles: {reason}")
        return "dense"
    return "on AMX tiles"


def text() -> str:
    return "\n".join(topics.topics[name] for name in TOPICS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--windows", type=int, default=5, help=f"of {WINDOW} tokens each")
    arguments = parser.parse_args()
    directory: Path = prepare(arguments.model, print)
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text()).ids
    exactly, dense, served = (
        Reader(Model.load(directory, CPU, torch.float32, kind)) for kind in ("dense", "fp16", "fp16")
    )
    many = _tile(served.model)
    names = (
        "float32",
        f"float32, {FEW} at once, off all at once",
        "rounded, dense, off float32",
        f"rounded, packed, {FEW} at once, off dense",
        f"rounded, {many}, off dense",
        f"rounded, {many}, then packed, off dense",
    )
    tallies = [Tally() for _ in names]
    for i in range(arguments.windows):
        window = ids[i * WINDOW : (i + 1) * WINDOW]
        exact, rounded = exactly.read(window, [WINDOW]), dense.read(window, [WINDOW])
        pairs = (
            (exact, exact),
            (exactly.read(window, [FEW]), exact),
            (rounded, exact),
            (served.read(window, [FEW]), rounded),
            (served.read(window, [WINDOW]), rounded),
            (served.read(window, [WINDOW // 2, *[FEW] * (WINDOW // 2 // FEW)]), rounded),
        )
        for tally, pair in zip(tallies, pairs, strict=True):
            tally.add(*pair, torch.tensor(window[1:]))
    print(f"\n{tallies[0].tokens} tokens of text\n")
    print(f"{'':44}{'perplexity':>12}{'same top-1':>12}{'off by':>15}{'at most':>10}")
    for name, tally in zip(names, tallies, strict=True):
        print(f"{name:44}{tally}")


if __name__ == "__main__":
    main()
