"""How much memory the KV pool gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from executor.kv.cache import KVCache
from executor.kv.eviction import KVLimits
from executor.kv.pool import BlockPool, KVLayout, auto_block_size
from shared.errors import StartupError
from shared.settings import ExecutorSettings, memory_bytes

_MEMINFO: Final = Path("/proc/meminfo")
_LEAST_BLOCKS: Final = 8  # below this a pool serves no conversation, and the setting is surely a slip


def check_memory(settings: ExecutorSettings, device: torch.device) -> None:
    """Raises StartupError for more memory than the device has; what a model leaves of it is known when it is there."""
    total = total_bytes(device)
    if memory_bytes(settings.kv_memory, free=0) > total:
        raise StartupError(
            f"kv_memory {settings.kv_memory} is more than {device} has ({total / 2**30:.1f} GiB); set less."
        )


def build_cache(layout: KVLayout, settings: ExecutorSettings) -> KVCache:
    """The pool that the settings ask for, and the tree over it. Raises StartupError where they ask for too little."""
    block_size = auto_block_size(layout) if settings.block_size == "auto" else settings.block_size
    memory = memory_bytes(settings.kv_memory, free_bytes(layout.device))
    blocks = layout.blocks_in(memory, block_size)
    if blocks < _LEAST_BLOCKS:
        raise StartupError(
            f"kv_memory {settings.kv_memory} holds {max(blocks, 0)} blocks of {block_size} tokens"
            f" ({layout.bytes_per_token * block_size / 2**20:.2f} MiB each); give it room for {_LEAST_BLOCKS} at least."
        )
    if block_size > settings.max_batch_tokens:
        raise StartupError(
            f"block_size {block_size} is above max_batch_tokens {settings.max_batch_tokens}: a step must take a block."
        )
    try:
        pool = BlockPool(layout, blocks, block_size)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when the allocator fails
        raise StartupError(
            f"kv_memory {settings.kv_memory} could not be allocated on {layout.device}; set less."
        ) from error
    return KVCache(pool, limits(settings))


def limits(settings: ExecutorSettings) -> KVLimits:
    """The cache's bounds as the settings give them."""
    return KVLimits(
        high_water=settings.high_water,
        low_water=settings.low_water,
        max_nodes=settings.max_cached_nodes,
        max_tokens=settings.max_cached_tokens,
        max_children=settings.max_children,
        max_roots=settings.max_roots,
        namespace_share=settings.namespace_share,
        max_pinned=settings.max_pinned,
        eviction=settings.eviction,
        min_cached_tokens=settings.min_cached_tokens,
        min_copy_tokens=settings.min_copy_tokens,
        prefix_cache=settings.prefix_cache,
    )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; all of it for a CPU whose system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024  # what the page cache would give back counts as free
    except (OSError, KeyError):  # not Linux
        return _physical_bytes()


def total_bytes(device: torch.device) -> int:
    """All the memory of the device."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else _physical_bytes()


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
