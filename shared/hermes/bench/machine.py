"""The machine that a benchmark's client runs on, as far as it bears on the figures."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and by what a benchmark was run."""

    cpu: str
    cores: int
    """That the client may use."""
    memory_bytes: int
    system: str
    python: str
    hermes: str
    load_average: float | None
    """Of the last minute when the benchmark began: what else ran there. None where the system does not tell."""


def this_machine() -> Machine:
    """The facts of here and now."""
    load: float | None = None
    with suppress(OSError):
        load = os.getloadavg()[0]
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        hermes=version("hermes-serving"),
        load_average=load,
    )


def _cpu() -> str:
    with suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
