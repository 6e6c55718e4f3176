"""The process that compiles a library with torch's own extension builder, loads it, and proves it.

    python -m executor.native.compiling SOURCE DIRECTORY NAME FLAG...

Leaves NAME.so in DIRECTORY. What goes wrong is on its output, and its exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from torch.utils import cpp_extension

from executor.native import kernel, tiles
from executor.native.kernel import NativeKernel
from executor.native.operators import NoKernelError
from executor.native.tiles import Tiles

_WIDTHS: Final = (16, 64, 80, 128)
"""Widths of heads: each model's own is proven where it is served."""


def _prove_attention(library: Path) -> None:
    attention = NativeKernel(library)
    for width in _WIDTHS:
        kernel.prove(attention, width)


def _prove_tiles(library: Path) -> None:
    tiles.prove(Tiles(library))


_PROOFS: Final = {"attention": _prove_attention, "tiles": _prove_tiles}
"""By the names of their sources."""


def main() -> int:
    """Returns the exit code."""
    source, directory, name, *flags = sys.argv[1:]
    try:
        cpp_extension.load(
            name=name,
            sources=[source],
            extra_cflags=flags,
            extra_ldflags=["-fopenmp"],
            build_directory=directory,
            is_python_module=False,
        )
        _PROOFS[Path(source).stem](Path(directory, f"{name}.so"))
    except (RuntimeError, OSError, NoKernelError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
