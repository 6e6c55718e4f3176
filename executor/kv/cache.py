"""The cache as the engine holds it: one pool, one tree over it, and the sequences that run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from executor.kv.description import Branch, describe
from executor.kv.eviction import Evictor, IdleLeaves, KVLimits
from executor.kv.integrity import check_pins, check_references, check_tree
from executor.kv.node import Scope
from executor.kv.pins import Pins
from executor.kv.pool import BlockPool
from executor.kv.sequence import SequenceBlocks
from executor.kv.tree import Match, PrefixTree

NOTHING: Final = Match([], None, 0)


@dataclass(frozen=True, slots=True)
class KVStats:
    """Sizes now, and counts since the start."""

    blocks_total: int
    """All that can be used: free + active + cached + pinned_idle."""
    blocks_free: int
    blocks_active: int
    """Held by running sequences, shared or their own."""
    blocks_cached: int
    """Held by the tree alone, free to evict."""
    blocks_pinned: int
    """Held by pins, each once however many hold it …"""
    blocks_pinned_idle: int
    """… and of these the ones that no running sequence reads: neither active nor free to evict."""
    blocks_private: int
    """Of the active ones those that one sequence writes. None at rest."""
    nodes: int
    tokens: int
    """Tokens in the tree's blocks."""
    roots: int
    evicted_blocks: int
    pruned_branches: int
    copied_tokens: int
    """Reused by copying part of a block; not what forks copy, which saves a prompt nothing."""


class KVCache:
    """Opens sequences on what the tree has, and keeps the pool within its limits. Owned by the engine's thread."""

    def __init__(
        self, pool: BlockPool, limits: KVLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives the seconds by which `describe` says how long a branch was idle."""
        limits = limits or KVLimits()
        idle = IdleLeaves(limits)
        self.pool = pool
        self.tree = PrefixTree(
            pool,
            min_copy_tokens=limits.min_copy_tokens,
            max_children=limits.max_children,
            max_roots=limits.max_roots,
            on_idle=idle.push,
            clock=clock,
        )
        self.pins = Pins(self.tree, pool.usable_blocks, limits)
        self._clock = clock
        self._limits = limits
        self._evictor = Evictor(pool, self.tree, idle, limits)
        self._sequences: set[SequenceBlocks] = set()
        self._copied_tokens = 0

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    @property
    def min_copy_tokens(self) -> int:
        """Fewest rows of a block that a prompt takes without sharing all of it."""
        return self._limits.min_copy_tokens

    @property
    def min_cached_tokens(self) -> int:
        """Shorter prompts are not published."""
        return self._limits.min_cached_tokens

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds at most. What is longer can never run."""
        return self.pool.usable_blocks * self.pool.block_size

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, or that may be evicted because neither sequences nor pins hold them."""
        return self._evictor.available_blocks

    def open(self, scope: Scope, prompt: Sequence[int], *, read: bool, write: bool) -> SequenceBlocks:
        """A sequence that begins with what the tree has of the prompt, but for its last token. O(prompt length).

        Rows of a block that agrees in part are copied, unless no block is left to copy them to. Without `read` it
        finds nothing; without `write`, or with a prompt that is too short, what it publishes goes when it ends.
        """
        match = self.tree.match(scope, prompt, len(prompt) - 1) if read else NOTHING
        if write and self._limits.prefix_cache and len(prompt) >= self._limits.min_cached_tokens:
            root = self.tree.enter(scope)
        else:
            root = self.tree.roots.enter_anonymous(scope, start=len(match.path) * self.block_size)
        sequence = SequenceBlocks(self.pool, self.tree, self._evictor, self._sequences, root=root, path=match.path)
        sequence.count_hit()
        if match.source is not None:
            try:
                sequence.copy_on_write(match.source, match.rows)
            except BaseException:
                sequence.release()
                raise
            self._copied_tokens += sequence.copied_tokens
        return sequence

    def match(self, scope: Scope, prompt: Sequence[int]) -> int:
        """How many tokens `open` would find. Holds and counts nothing."""
        return self._length(self.tree.match(scope, prompt, len(prompt) - 1))

    def covers(self, scope: Scope, tokens: Sequence[int]) -> int:
        """As `match`, but all of the tokens may be found, the last one too. As many a pin would hold."""
        return self._length(self.tree.match(scope, tokens, len(tokens)))

    def keepable(self, length: int) -> int:
        """How many tokens of a prompt of this length stay in the tree: `covers` when it has all that it can have.

        The others fill too little of a block to be worth copying, or the prompt is too short to be published.
        """
        if not self._limits.prefix_cache or length < self._limits.min_cached_tokens:
            return 0
        rest = length % self.block_size
        return length if rest >= self._limits.min_copy_tokens else length - rest

    def flush(self, namespace: str | None) -> int:
        """Drops all that is cached of a namespace, or of all for None, and its pins. Returns the blocks freed at once.

        Sequences that run keep what they read until they release it; nobody else finds that, nor what they publish
        from now on. O(nodes).
        """
        self.pins.drop(namespace)
        return sum(self.tree.forget(root) for root in self.tree.roots.of(namespace))

    def describe(self, namespace: str | None, max_branches: int) -> list[Branch]:
        """The largest branches of a namespace, or of all for None. O(nodes)."""
        return describe(self.tree, namespace, max_branches, self._clock())

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-tokens // self.block_size)

    def can_hold(self, tokens: int) -> bool:
        """Whether so many tokens would get slots now, with nothing shared."""
        return self.blocks_for(tokens) <= self.available_blocks

    def can_admit(self, scope: Scope, prompt: Sequence[int], length: int, *, read: bool = True) -> bool:
        """Whether this prompt, opened now, could reserve `length` tokens.

        Blocks that sequences or pins hold cost nothing; those that it finds idle are as good as evicted.
        """
        path = self.tree.match(scope, prompt, len(prompt) - 1).path if read else []
        held = sum(node.is_held for node in path)
        return self.blocks_for(length) - held <= self.available_blocks

    def reclaim(self) -> None:
        """Holds the high-water mark and the limits of the tree. To be called between steps, never inside one."""
        self._evictor.reclaim()

    @property
    def stats(self) -> KVStats:
        pool, tree = self.pool, self.tree
        return KVStats(
            blocks_total=pool.usable_blocks,
            blocks_free=pool.free_blocks,
            blocks_active=pool.private_blocks + tree.referenced,
            blocks_cached=tree.evictable,
            blocks_pinned=tree.pinned,
            blocks_pinned_idle=tree.pinned_idle,
            blocks_private=pool.private_blocks,
            nodes=tree.nodes,
            tokens=tree.tokens,
            roots=len(tree.roots),
            evicted_blocks=tree.evicted_blocks,
            pruned_branches=tree.pruned_branches,
            copied_tokens=self._copied_tokens,
        )

    def check(self) -> None:
        """Proves that every block is exactly one of free, the tree's or one sequence's own, and that all counts agree.

        Raises IntegrityError. O(blocks + nodes): for tests, and for an engine at rest.
        """
        self.pool.check()
        check_tree(self.tree, self.pool)
        check_references(self.tree, self.pool, self._sequences)
        check_pins(self.tree, self.pins)

    def _length(self, found: Match) -> int:
        return len(found.path) * self.block_size + found.rows
