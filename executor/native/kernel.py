"""The compiled kernel, and the proof that it computes what torch's own attention does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from executor.kv.pool import KVLayout
from executor.native.operators import NoKernelError, load
from executor.native.parts import Parts, Run, Stretch, cut

_WIDTH: Final = 16  # floats of the widest vectors; a narrower machine's are a fraction of it
_TOLERANCE: Final = 1e-5
"""How far an output may be from torch's, for keys and values of a standard deviation of one: sums in another order are
off by 1e-6 at most, a key too many or too few by 1e-3 and more."""
_NEIGHBOUR: Final = float("nan")  # what lies beside the keys of a sequence may be anything
_RATIOS: Final = (1, 2, 3, 4, 5, 13, 15, 17)
"""Heads of queries for one of keys: the kernel's ways for few and for many queries, with rests of each size."""
_LENGTHS: Final = (1, 2, 15, 16, 17, 63, 64, 65, 150, 256, 257, 600)
_SHARED: Final = 300
_BEFORE, _PROMPT = 1010, 33  # keys before the first row of a prompt, and its rows: the last of them need a part more
_BLOCK: Final = 24
_KV_HEADS: Final = 2


class AttentionKernel(Protocol):
    """What attends the rows of a step in one call for a layer."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, parts: Parts, *, scale: float, output: Tensor
    ) -> None:
        """Attends `[heads, T, head_dim]` and writes the rows of `output`, `[T, heads, head_dim]`, that parts have.

        keys, values: the layer's whole pool, `[slots, kv_heads, head_dim]`.
        """


@dataclass(frozen=True, slots=True)
class KernelCall:
    """All the rows of a step."""

    kernel: AttentionKernel
    parts: Parts


class NativeKernel:
    """The kernel of a compiled library. Works on float32 on the CPU, and on whatever threads torch has."""

    def __init__(self, library: Path) -> None:
        """Loads `library`. Raises NoKernelError where it cannot be loaded."""
        self._attend = load(library).attend.default

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, parts: Parts, *, scale: float, output: Tensor
    ) -> None:
        """As AttentionKernel says."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        self._attend(query, keys, values, *parts, scale, output)


def require_fit(layout: KVLayout) -> None:
    """Raises NoKernelError for a pool that the kernel does not read."""
    if layout.device.type != "cpu":
        raise NoKernelError(f"it is for CPUs, and the model runs on {layout.device}")
    if layout.dtype != torch.float32:
        raise NoKernelError(f"it reads float32, and the pool holds {str(layout.dtype).removeprefix('torch.')}")
    if layout.head_dim % _WIDTH:
        raise NoKernelError(
            f"it reads heads whose width is a multiple of {_WIDTH}, and the model's is {layout.head_dim}"
        )


@torch.inference_mode()
def prove(kernel: AttentionKernel, head_dim: int) -> None:
    """Compares a kernel with torch's attention, for sequences of many lengths, alone and sharing keys.

    Raises NoKernelError where an output differs by more than sums in another order do.
    """
    generator = torch.Generator().manual_seed(0)
    slots, stretches = _trial(generator)
    parts = cut(stretches)
    rows = len(_LENGTHS) + _PROMPT
    reads = [[slot for each in stretches if row in each.rows for slot in each.read_by(row)] for row in range(rows)]
    beside = torch.ones(slots, dtype=torch.bool)
    beside[sorted(set().union(*reads))] = False
    for ratio in _RATIOS:
        heads = _KV_HEADS * ratio
        query = torch.randn(rows, heads, head_dim, generator=generator).transpose(0, 1)
        keys, values = (torch.randn(slots, _KV_HEADS, head_dim, generator=generator) for _ in range(2))
        keys[beside] = values[beside] = _NEIGHBOUR
        output = torch.empty(rows, heads, head_dim)
        kernel.attend(query, keys, values, parts, scale=head_dim**-0.5, output=output)
        for row, read in enumerate(reads):
            expected = functional.scaled_dot_product_attention(
                query[None, :, row, None],
                keys[None, read].transpose(1, 2),
                values[None, read].transpose(1, 2),
                enable_gqa=True,
            )
            off = float((output[row] - expected[0, :, 0]).abs().max())
            if not off <= _TOLERANCE:
                raise NoKernelError(
                    f"its results differ from torch's by {off:.2g}, for {len(read)} keys of {head_dim} and"
                    f" {ratio} heads of queries for one of keys"
                )


def _trial(generator: torch.Generator) -> tuple[int, list[Stretch]]:
    """The slots of a pool, and sequences of all lengths in scattered blocks.

    Every other one shares a beginning, and the longest one has several rows, the end of a prompt.
    """
    lengths = (*_LENGTHS, _BEFORE + _PROMPT)
    blocks = [-(-length // _BLOCK) for length in lengths]
    places = iter((torch.randperm(sum(blocks), generator=generator) * _BLOCK + _SHARED).tolist())
    runs = [[Run(next(places), min(_BLOCK, length - at)) for at in range(0, length, _BLOCK)] for length in lengths]
    alone = [Stretch([row], own) for row, own in enumerate(runs[:-1])]
    prompt = Stretch(range(len(alone), len(alone) + _PROMPT), runs[-1], _BEFORE + 1)
    return _SHARED + sum(blocks) * _BLOCK, [prompt, Stretch(range(0, len(alone), 2), [Run(0, _SHARED)]), *alone]
