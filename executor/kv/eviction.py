"""Eviction: which leaf goes, and when.

Only leaves that nobody reads and no pin holds go, the least recently used first. A prefix is no leaf before all that
was built on it is gone, so of blocks that were used together the deepest goes first. `lfu_aged` ranks by use counts
instead, with the ageing of LFU-DA (Arlitt et al., "Evaluating content management techniques for Web proxy caches",
1999): a leaf's rank is its uses plus the rank that was evicted last when it fell idle, so that old fame fades.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Final, Literal, NamedTuple

from executor.kv.node import Node
from executor.kv.pool import BlockPool, OutOfBlocks
from executor.kv.tree import PrefixTree

COMPACT_FROM: Final = 64
"""Fewer entries, or heaps, are not worth sweeping."""


@dataclass(frozen=True, slots=True)
class KVLimits:
    """What bounds the cache, and how it chooses what to lose. Raises ValueError for what contradicts itself."""

    prefix_cache: bool = True
    """False: requests neither find nor leave anything."""
    eviction: Literal["lru", "lfu_aged"] = "lru"
    high_water: float = 0.90
    """Share of the blocks in use above which `reclaim` evicts …"""
    low_water: float = 0.80
    """… down to this one."""
    max_nodes: int | None = None
    max_tokens: int | None = None
    max_children: int = 256
    """Most children of a node, before its least recently used idle branch is pruned."""
    max_roots: int = 1024
    """Most scopes, and most first blocks of one."""
    namespace_share: float = 1.0
    """Share of the blocks above which a namespace loses its own leaves first."""
    max_pinned: float = 0.5
    """Most of the blocks that pins hold together, as a share. 0: nothing can be pinned."""
    min_cached_tokens: int = 1
    """Shorter prompts are not published."""
    min_copy_tokens: int = 4
    """Fewest rows that are worth copying out of a block, or keeping as a partial one."""

    def __post_init__(self) -> None:
        if not 0 < self.low_water <= self.high_water <= 1:
            raise ValueError(f"0 < low_water <= high_water <= 1, not {self.low_water} and {self.high_water}")
        if not 0 < self.namespace_share <= 1:
            raise ValueError(f"namespace_share is above 0 and at most 1, not {self.namespace_share}")
        if not 0 <= self.max_pinned < 1:
            raise ValueError(f"max_pinned is at least 0 and below 1, not {self.max_pinned}")
        if min(self.max_children, self.max_roots, self.min_cached_tokens, self.min_copy_tokens) < 1:
            raise ValueError("max_children, max_roots, min_cached_tokens and min_copy_tokens are at least 1")


class Entry(NamedTuple):
    """A leaf as it was when it fell idle. Stale once the leaf was used again or left the tree."""

    rank: int
    last_use: int
    serial: int
    leaf: Node

    @property
    def is_fresh(self) -> bool:
        return self.leaf.is_idle_leaf and self.leaf.last_use == self.last_use


class LeafHeap:
    """Entries by rank. Stale ones stay until they surface or outnumber the fresh: O(log n) amortized."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._compact_at = COMPACT_FROM

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._entries, entry)
        if len(self._entries) > self._compact_at:
            self.compact()

    def compact(self) -> int:
        """Drops the stale entries, and returns how many are left."""
        self._entries = [entry for entry in self._entries if entry.is_fresh]
        heapq.heapify(self._entries)
        self._compact_at = max(2 * len(self._entries), COMPACT_FROM)
        return len(self._entries)

    def pop(self) -> Entry | None:
        """The first fresh entry."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if entry.is_fresh:
                return entry
        return None


class IdleLeaves:
    """All leaves that nobody holds, in the order in which they go."""

    def __init__(self, limits: KVLimits) -> None:
        self._ages = limits.eviction == "lfu_aged"
        self._by_namespace = limits.namespace_share < 1
        self._age = 0
        self._serial = count()
        self._all = LeafHeap()
        self._heaps: dict[str, LeafHeap] = {}
        self._sweep_at = COMPACT_FROM

    def push(self, leaf: Node) -> None:
        """A leaf fell idle, or an idle node became a leaf."""
        uses = 1 + leaf.hits  # its own first use counts: what is never hit must age the others too
        rank = self._age + uses if self._ages else leaf.last_use
        entry = Entry(rank, leaf.last_use, next(self._serial), leaf)
        self._all.push(entry)
        if self._by_namespace:
            self._heap_of(leaf.root.scope.namespace).push(entry)

    def pop(self) -> Node | None:
        """The leaf that goes first; the caller removes it from the tree."""
        return self._taken(self._all.pop())

    def pop_of(self, namespace: str) -> Node | None:
        """The leaf of a namespace that goes first. None too where `namespace_share` is 1: nobody has to ask then."""
        heap = self._heaps.get(namespace)
        return self._taken(heap.pop()) if heap else None

    def _heap_of(self, namespace: str) -> LeafHeap:
        heap = self._heaps.get(namespace)
        if heap is None:
            if len(self._heaps) >= self._sweep_at:  # or namespaces that came once would stay for ever
                self._heaps = {name: old for name, old in self._heaps.items() if old.compact()}
                self._sweep_at = max(2 * len(self._heaps), COMPACT_FROM)
            heap = self._heaps[namespace] = LeafHeap()
        return heap

    def _taken(self, entry: Entry | None) -> Node | None:
        if entry is None:
            return None
        self._age = max(self._age, entry.rank)
        return entry.leaf


class Evictor:
    """Frees blocks of the tree: what is needed at once, or down to the low-water mark between steps."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, idle: IdleLeaves, limits: KVLimits) -> None:
        self._pool = pool
        self._tree = tree
        self._idle = idle
        self._limits = limits
        self._most_held = limits.namespace_share * pool.usable_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, and blocks of the tree that neither sequences nor pins hold."""
        return self._pool.free_blocks + self._tree.evictable

    def make_room(self, blocks: int) -> None:
        """Sees to it that so many blocks are free. Raises OutOfBlocks, and then has evicted nothing."""
        if blocks > self.available_blocks:
            raise OutOfBlocks(f"{blocks} blocks are needed, and {self.available_blocks} are free or may be evicted")
        self._evict(blocks - self._pool.free_blocks)

    def reclaim(self) -> None:
        """Between steps: above the high-water mark evicts down to the low one, and holds the limits of the tree."""
        limits, usable = self._limits, self._pool.usable_blocks
        in_use = usable - self._pool.free_blocks
        if in_use > limits.high_water * usable:
            self._evict(in_use - int(limits.low_water * usable))
        if limits.max_nodes is not None:
            self._evict(self._tree.nodes - limits.max_nodes)
        if limits.max_tokens is not None:
            while self._tree.tokens > limits.max_tokens and self._evict(1):
                pass

    def _evict(self, blocks: int) -> int:
        """Evicts up to so many blocks, and returns how many there were to evict."""
        evicted = 0
        for leaf in islice(self._victims(), max(blocks, 0)):
            self._tree.remove(leaf)
            evicted += 1
        return evicted

    def _victims(self) -> Iterator[Node]:
        """Idle leaves in the order in which they go. The taker removes each before it asks for the next."""
        if self._limits.namespace_share < 1:
            for namespace in list(self._tree.held):
                while self._tree.held[namespace] > self._most_held and (leaf := self._idle.pop_of(namespace)):
                    yield leaf
        while leaf := self._idle.pop():
            yield leaf
