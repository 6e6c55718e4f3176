"""Products of many rows on the tiles of AMX, and the proof that they are as exact as single precision."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from executor.native.operators import NoKernelError, load

_CPU: Final = Path("/proc/cpuinfo")
_NEEDED: Final = ("amx_tile", "amx_bf16", "avx512_bf16")
_OUTPUTS: Final = 16  # of a tile; a linear's have to be a multiple of it
_INPUTS: Final = 32
_SHAPES: Final = ((16, 32), (48, 96), (176, 1536))  # outputs and inputs: odd and even numbers of tiles
_ROWS: Final = (1, 2, 7, 15, 16, 17, 31, 32, 33, 100)
_TOLERANCE: Final = 1e-6
"""How far a product may be off, as a share of its norm. Single precision is off by 1e-7 to 4e-7, and so are these; with
one of the smaller parts missing it is 3e-6 and more."""


class Tiles:
    """The products of a compiled library. They work on float32 on the CPU, on whatever threads torch has."""

    def __init__(self, library: Path) -> None:
        """Loads `library`. Raises NoKernelError where that cannot be, or where Linux keeps the tiles to itself."""
        operators = load(library)
        self._pack, self._multiply = operators.pack.default, operators.multiply.default
        if not operators.may_use_tiles.default():
            raise NoKernelError("Linux does not let this process use AMX")

    @staticmethod
    def fits(linear: nn.Module) -> bool:
        """Whether a linear's shape fits tiles."""
        return int(linear.out_features) % _OUTPUTS == 0 and int(linear.in_features) % _INPUTS == 0  # type: ignore[arg-type]

    def pack(self, weight: Tensor) -> Tensor:
        """The weight of a linear, `[outputs, inputs]`, as `multiply` takes it: 4 bytes a number. Takes one thread.

        Exact for numbers that half precision holds, and off by 2 ** -17 of others.
        """
        packed: Tensor = self._pack(weight.detach().contiguous())
        return packed

    def multiply(self, rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`. Rows with infinite numbers come out as not a number."""
        product: Tensor = self._multiply(rows.contiguous(), packed, bias)
        return product


def require_fit() -> None:
    """Raises NoKernelError for a CPU without what it takes."""
    try:
        lines = _CPU.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NoKernelError(f"{_CPU} cannot be read: {error.strerror}") from error
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    lacks = [each for each in _NEEDED if each not in flags]
    if lacks:
        raise NoKernelError(f"this CPU lacks {lacks[0]}")


@torch.inference_mode()
def prove(tiles: Tiles) -> None:
    """Compares products with those in double precision. Raises NoKernelError where one is too far off."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in _SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).half().float()
        bias = torch.randn(outputs, generator=generator)
        packed = tiles.pack(weight)
        for count in _ROWS:
            rows = torch.randn(count, inputs, generator=generator)
            expected = rows.double() @ weight.double().T
            for given, product in ((None, expected), (bias, expected + bias)):
                off = float((tiles.multiply(rows, packed, given) - product).norm() / product.norm())
                if not off <= _TOLERANCE:
                    raise NoKernelError(
                        f"its products of {count} rows differ by {off:.2g} of their norm from double precision,"
                        f" for {inputs} inputs and {outputs} outputs"
                    )
