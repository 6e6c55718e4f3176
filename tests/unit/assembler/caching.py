"""Assemblers that remember, for tests."""

from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from assembler.application import Model, assembler_of
from assembler.cache.cache import AssemblyCache
from assembler.cache.memory import MemoryTier
from assembler.metrics import AssemblerMetrics
from assembler.model_files import ModelFiles
from assembler.orders import Assembled, Order
from assembler.pipeline import Assembler
from shared.settings import AssemblerSettings

MOST_BYTES = 2**26
AGE = 3600.0


class Remembering(NamedTuple):
    """One cache, in memory alone, and what was counted."""

    cache: AssemblyCache
    metrics: AssemblerMetrics

    def assembler(self, files: ModelFiles, name: str = "m", fingerprint: str = "f", **settings: Any) -> Assembler:
        return assembler_of(AssemblerSettings(**settings), Model(name, fingerprint, files), self.cache, self.metrics)

    def count(self, name: str, **labels: str) -> int:
        return self.metrics.read().of(name, **labels)

    async def is_hit(self, assembler: Assembler, order: Order) -> tuple[bool, Assembled]:
        """Whether the whole prompt was in the cache, and the prompt."""
        before = self.count("lookups_total", result="memory")
        assembled = await assembler.assemble(order)
        return self.count("lookups_total", result="memory") > before, assembled


def remembering() -> Remembering:
    metrics = AssemblerMetrics("m", CollectorRegistry())
    return Remembering(AssemblyCache(MemoryTier(MOST_BYTES, AGE, metrics.forgotten)), metrics)
