"""What native code there is for an engine: attention, and linears of many rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch

from executor.engine import Engine
from executor.model import Model
from executor.native import kernel, library, tiles
from executor.native.adoption import Addition
from executor.native.kernel import NativeKernel
from executor.native.operators import NoKernelError
from executor.native.tiles import Tiles
from executor.pace import step_tokens
from executor.tiling import Tiling
from shared.settings import CpuAttention

log: Final = logging.getLogger(__name__)


def additions(setting: CpuAttention, model: Model, engine: Engine) -> list[Addition]:
    """Those that a model on its device can have, if the settings want them."""
    found: list[Addition] = []
    if setting == "native" or (setting == "auto" and model.device.type == "cpu"):
        found.append(NativeAttention(setting, model, engine))
    if model.packed_rows:
        found.append(TiledLinears(model, engine))
    return found


class NativeAttention:
    """The kernel of `attention.cpp`."""

    name = "native attention kernel"

    def __init__(self, setting: CpuAttention, model: Model, engine: Engine) -> None:
        self.insist = "set cpu_attention = auto to serve without it" if setting == "native" else None
        self._layout = model.layout
        self._engine = engine

    def source(self) -> library.Source:
        """As Addition says."""
        kernel.require_fit(self._layout)
        return library.attention()

    def bring(self, compiled: Path) -> None:
        """As Addition says."""
        native = NativeKernel(compiled)
        kernel.prove(native, self._layout.head_dim)
        self._engine.adopt(lambda: setattr(self._engine, "kernel", native))
        log.info("attention: native (%s)", torch.backends.cpu.get_cpu_capability())

    def leave_out(self, reason: NoKernelError) -> None:
        """As Addition says."""
        log.warning("attention: torch's own, since there is no native kernel: %s", reason)


class TiledLinears:
    """The products of `tiles.cpp`, in the place of dense ones beside packed weights."""

    name = "AMX linears"
    insist: str | None = None

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    def source(self) -> library.Source:
        """As Addition says."""
        tiles.require_fit()
        return library.tiles()

    def bring(self, compiled: Path) -> None:
        """As Addition says."""
        native = Tiles(compiled)
        tiles.prove(native)
        tiling = Tiling.of(self._model.module, native)

        def change() -> None:
            tiling.apply(self._model.network)
            self._engine.scheduler.set_pace(step_tokens(self._model))

        self._engine.adopt(change)
        log.info("CPU linears: packed up to %d rows, on AMX tiles above", tiling.most_rows)

    def leave_out(self, reason: NoKernelError) -> None:
        """As Addition says."""
        log.info(
            "CPU linears: dense above %d rows, since there are none on AMX tiles: %s", self._model.packed_rows, reason
        )
