"""The operators of a compiled library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

_loaded: Final[dict[str, Any]] = {}
"""Of the process: a library that is loaded twice ends it."""


class NoKernelError(Exception):
    """There is no native code for this machine or model. Its text is half a sentence that says why."""


def load(library: Path) -> Any:
    """The operators of `library`, whose name is also theirs. Raises NoKernelError where it cannot be loaded."""
    name = library.stem
    if name not in _loaded:
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise NoKernelError(f"{library} cannot be loaded: {error.__cause__ or error}") from error
        _loaded[name] = getattr(torch.ops, name)
    return _loaded[name]
