"""When an engine gets the native kernel: before its first step where it is compiled already, else while it serves.

Compiling takes some twenty seconds, more beside a busy engine. Nobody waits for that: torch's own attention serves
until the kernel is there, and the engine changes over between two steps. Whoever asks for the kernel by name
(`cpu_attention = "native"`) does wait, because without it there is no start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from executor.kv.pool import KVLayout
from executor.native import library
from executor.native.kernel import DecodeKernel, NativeKernel, NoKernelError, prove, require_fit
from shared.errors import HermesError, StartupError
from shared.settings import CpuAttention

log: Final = logging.getLogger(__name__)


class Adoption:
    """Brings the kernel to one engine."""

    def __init__(self, setting: CpuAttention, layout: KVLayout, adopt: Callable[[DecodeKernel], object]) -> None:
        """adopt: takes a kernel that was proven; called from any thread, raises HermesError when the engine ended."""
        self._setting = setting
        self._layout = layout
        self._adopt = adopt
        self._stopped = threading.Event()
        self._builder: threading.Thread | None = None

    def begin(self) -> None:
        """Does what the setting says. Raises StartupError where it is "native" and the kernel cannot be had."""
        if self._setting == "torch" or (self._setting == "auto" and self._layout.device.type != "cpu"):
            return
        try:
            require_fit(self._layout)
            place = library.place()
            if library.is_there(place):
                self._bring(place)
            elif self._setting == "native":
                log.info("building the native attention kernel; takes half a minute")
                library.build(place, self._stopped)
                self._bring(place)
            else:
                library.require_tools()
                log.info("building the native attention kernel beside serving; torch's own serves until it is there")
                self._builder = threading.Thread(target=self._build, args=(place,), name="native", daemon=True)
                self._builder.start()
        except NoKernelError as reason:
            if self._setting == "native":
                raise StartupError(
                    f"There is no native attention kernel: {reason}; set cpu_attention = auto to serve without it."
                ) from reason
            _leave_out(reason)

    def close(self) -> None:
        """Ends a build that runs, and waits for that."""
        self._stopped.set()
        if self._builder is not None:
            self._builder.join()

    def _build(self, place: Path) -> None:
        try:
            library.build(place, self._stopped)
            self._bring(place)
        except NoKernelError as reason:
            if not self._stopped.is_set():
                _leave_out(reason)
        except HermesError:
            log.debug("the engine ended before it got its kernel")
        except Exception:
            log.exception("building the native attention kernel failed; torch's own serves")

    def _bring(self, place: Path) -> None:
        kernel = NativeKernel(place)
        prove(kernel, self._layout.head_dim)
        self._adopt(kernel)
        log.info("attention of decoding sequences: native (%s)", torch.backends.cpu.get_cpu_capability())


def _leave_out(reason: NoKernelError) -> None:
    log.warning("attention of decoding sequences: torch's own, since there is no native kernel: %s", reason)
