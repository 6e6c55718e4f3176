"""The assembly cache as the settings say."""

from pathlib import Path
from typing import Final

from assembler.cache.cache import AssemblyCache
from assembler.cache.disk import DiskLimits, DiskTier
from assembler.cache.memory import MemoryTier
from assembler.cache.notices import Notices
from assembler.metrics import AssemblerMetrics
from shared.directories import cache_directory
from shared.settings import AssemblerSettings

_NAME: Final = "assembly"
_NOTICES: Final = "flushed"


def build(settings: AssemblerSettings, metrics: AssemblerMetrics, processes: Path | None) -> AssemblyCache:
    """processes: a directory that this process's siblings share with it; None where it has none."""
    age = settings.cache_age_seconds
    memory = MemoryTier(int(settings.cache_memory_bytes) if settings.cache else 0, age, metrics.forgotten)
    if not settings.cache or not settings.cache_disk_bytes:
        return AssemblyCache(memory, None, None if processes is None else Notices(processes / _NOTICES))
    directory = (settings.cache_directory or cache_directory() / _NAME).expanduser()
    disk = DiskTier(DiskLimits(directory, int(settings.cache_disk_bytes), age), metrics)
    return AssemblyCache(memory, disk, Notices(directory / _NOTICES))
