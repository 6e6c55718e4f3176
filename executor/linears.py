"""Linears for CPUs: weights packed in half precision for few rows, another product for many.

Few rows leave a linear waiting for its weights to come from memory, and half as many bytes come twice as fast; many
rows are bound by arithmetic, where the dense product is faster, or one on AMX tiles (`tiling.py`). All multiply the
same weights, rounded to half precision, as exactly as single precision does, so that the number of rows in a step
changes a result by no more than the order of summation does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn

_HALF_PRECISION: Final = 2.0**-11
"""The most that rounding to half precision moves a number of its normal range, as a share of it."""
_FAINT: Final = 2.0**-10
"""Rows fainter than this share of their tensor's typical row may lose more: ids that no text has, mostly."""
_CHUNK_ROWS: Final = 4096  # of a weight at once, so that looking at a large head takes little memory

_LADDER: Final = (1, 4, 8, 16, 32, 48, 64, 96, 128)
"""Row counts at which both forms are timed. The crossing was between 32 and 96 on the machines tried; beyond, there is
little between them, and timing takes long."""
_LOSSES: Final = 2  # in a row end the climb
_ROUNDS: Final = 3  # of which the fastest counts: what disturbs one only makes it slower
_SAMPLE_WEIGHTS: Final = 8_000_000  # two layers of a small model: more than a core's own caches hold
_FEWEST_ROWS: Final = 8
"""The row count up to which packed weights serve where they were asked for and yet won nowhere."""


Product = Callable[[Tensor], Tensor]
"""What a linear does: `[..., in]` to `[..., out]`."""


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear`: `[..., in]` to `[..., out]`, packed up to `most_rows` rows, dense above."""

    def __init__(self, dense: nn.Linear, most_rows: int) -> None:
        """Shares the weights of `dense`, which have to be rounded already."""
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.weight, self.bias = dense.weight, dense.bias
        self.most_rows = most_rows
        self._packed = _pack(dense)
        self._many: Product = self._dense

    def forward(self, rows: Tensor) -> Tensor:
        return self.few(rows) if rows.numel() <= self.most_rows * self.in_features else self._many(rows)

    def few(self, rows: Tensor) -> Tensor:
        """The product by packed weights, whatever the number of rows."""
        return _multiply(rows, self._packed)

    def replace_dense(self, many: Product, most_rows: int) -> None:
        """Takes another product for more than `most_rows` rows, and lets go of the dense weight."""
        self._many, self.most_rows = many, most_rows
        self.weight = let_go()

    def _dense(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)


Linear = TypeVar("Linear", nn.Linear, PackedLinear)


def let_go() -> nn.Parameter:
    """What stands in the place of a weight that nothing reads any more."""
    return nn.Parameter(torch.empty(0), requires_grad=False)


class Crossing(NamedTuple):
    """Where packed linears stop being faster than another product of the same weights."""

    most_rows: int
    """The largest row count of those tried at which they were faster; 0 where they never were."""
    speedup: float
    """How many times faster they were at the row count where they gained most."""


def linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """All plain linears under a module, each with its parent and its name there. Subclasses do more than that."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


def available() -> bool:
    """Whether this CPU and this build of torch have linears with packed weights that compute what they should."""
    dense = nn.Linear(24, 40)
    with torch.no_grad():
        round_weights(nn.Sequential(dense))
        rows = torch.randn(3, 24)
        try:
            packed = _multiply(rows, _pack(dense))
        except (RuntimeError, AttributeError):  # the first where the CPU lacks it, the second where torch does
            return False
        return torch.allclose(packed, dense(rows), atol=1e-5)


@torch.no_grad()
def lost_in_half(module: nn.Module) -> str | None:
    """The name of a weight that half precision cannot hold, or None: too large, not a number, or too small to keep.

    Judged by rows, since a row is one output: rounding may not move it further than it moves numbers of the normal
    range, as a share of the row or of a thousandth of a typical one.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for _, _, linear in linears(module):
        weight = linear.weight
        typical = float(weight.norm()) / math.sqrt(len(weight))
        for part in torch.split(weight, _CHUNK_ROWS):
            moved = (part.half().float() - part).norm(dim=1)
            allowed = part.norm(dim=1).clamp_(min=_FAINT * typical).mul_(_HALF_PRECISION)
            if not bool(((moved <= allowed) & moved.isfinite()).all()):
                return names[id(weight)]
    return None


@torch.no_grad()
def round_weights(module: nn.Module) -> None:
    """Rounds the weights of all linears to half precision, in place; an embedding that is tied to one is so too."""
    for _, _, linear in linears(module):
        for part in torch.split(linear.weight, _CHUNK_ROWS):
            part.copy_(part.half())


def find_crossing(module: nn.Module) -> Crossing:
    """Times packed and dense products on some of the module's linears. Takes about a second."""
    sample = sample_of([linear for _, _, linear in linears(module)])
    packed = [_pack(linear) for linear in sample]
    return crossing_of(
        [linear.in_features for linear in sample],
        [lambda rows, weights=weights: _multiply(rows, weights) for weights in packed],  # type: ignore[misc]
        [lambda rows, linear=linear: F.linear(rows, linear.weight, linear.bias) for linear in sample],  # type: ignore[misc]
    )


@torch.inference_mode()
def crossing_of(widths: Sequence[int], few: Sequence[Product], many: Sequence[Product]) -> Crossing:
    """Times two products of each of some linears with so many inputs, at growing row counts.

    On one thread, and by its time of the processor: beside other programs the time of day, and how long threads wait
    for each other, says more about those than about the linears.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _climb(widths, few, many)
    finally:
        torch.set_num_threads(threads)


def _climb(widths: Sequence[int], few: Sequence[Product], many: Sequence[Product]) -> Crossing:
    most_rows, speedup, losses = 0, 1.0, 0
    for count in _LADDER:
        rows = {width: torch.randn(count, width) for width in set(widths)}
        inputs = [rows[width] for width in widths]
        times = [(_seconds(many, inputs), _seconds(few, inputs)) for _ in range(_ROUNDS)]
        gain = min(one for one, _ in times) / min(other for _, other in times)
        if gain > 1:
            most_rows, losses = count, 0
        else:
            losses += 1
        speedup = max(speedup, gain)
        if losses == _LOSSES:
            break
    return Crossing(most_rows, speedup)


def asked_for(crossing: Crossing) -> Crossing:
    """The crossing to use where packed linears are wanted in any case."""
    return crossing._replace(most_rows=max(crossing.most_rows, _FEWEST_ROWS))


def pack(module: nn.Module, most_rows: int) -> None:
    """Puts a packed linear in the place of each linear of a module whose weights are rounded."""
    places = list(linears(module))
    distinct = {id(linear): linear for _, _, linear in places}
    # Packing goes number by number, on one thread, and lets others run.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        made = threads.map(lambda linear: PackedLinear(linear, most_rows), distinct.values())
        packed = dict(zip(distinct, made, strict=True))
    for parent, name, linear in places:
        setattr(parent, name, packed[id(linear)])


def sample_of(candidates: Sequence[Linear]) -> list[Linear]:
    """The first linears of layers that have enough weights between them to be read from memory.

    What layers are made of comes more than once. A head, of which there is one, runs on few rows whatever a step has.
    """
    shapes = Counter((linear.out_features, linear.in_features) for linear in candidates)
    sample: list[Linear] = []
    weights = 0
    for linear in [each for each in candidates if shapes[each.out_features, each.in_features] > 1] or candidates:
        if weights >= _SAMPLE_WEIGHTS:
            break
        sample.append(linear)
        weights += linear.out_features * linear.in_features
    return sample


def _seconds(products: Sequence[Product], inputs: Sequence[Tensor]) -> float:
    begin = time.thread_time()
    for product, rows in zip(products, inputs, strict=True):
        product(rows)
    return time.thread_time() - begin


def _pack(linear: nn.Linear) -> Any:
    bias = None if linear.bias is None else linear.bias.detach()
    return torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)


def _multiply(rows: Tensor, packed: Any) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows, packed)
    return product
