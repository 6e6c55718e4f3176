"""The process that compiles the kernel with torch's own extension builder, loads it, and proves it.

    python -m executor.native.compiling SOURCE DIRECTORY NAME FLAG...

Leaves NAME.so in DIRECTORY. What goes wrong is on its output, and its exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from torch.utils import cpp_extension

from executor.native.kernel import NativeKernel, NoKernelError, prove

_WIDTHS: Final = (16, 64, 80, 128)
"""Widths of heads: each model's own is proven where it is served."""


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
        kernel = NativeKernel(Path(directory, f"{name}.so"))
        for width in _WIDTHS:
            prove(kernel, width)
    except (RuntimeError, OSError, NoKernelError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
