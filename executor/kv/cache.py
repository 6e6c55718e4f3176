"""The cache as the engine holds it: one pool, one tree over it, and the sequences that run."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from executor.kv.description import Branch, describe
from executor.kv.eviction import Evictor, IdleLeaves, KVLimits
from executor.kv.integrity import check_pins, check_references, check_tree
from executor.kv.node import NOTHING, Match, Node, Scope
from executor.kv.pins import Pins
from executor.kv.pool import BlockPool
from executor.kv.private import PrivateRoots
from executor.kv.sequence import SequenceBlocks
from executor.kv.tree import PrefixTree


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
    """Of what requests found, the part that was reused by copying."""


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
        self.pins = Pins(self.tree, pool, limits)
        self._clock = clock
        self._limits = limits
        self._evictor = Evictor(pool, self.tree, idle, limits)
        self._sequences: set[SequenceBlocks] = set()
        self._copied_tokens = 0

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds at most. What is longer can never run."""
        return self.pool.usable_blocks * self.pool.block_size

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, or that may be evicted because neither sequences nor pins hold them."""
        return self._evictor.available_blocks

    def publishes(self, scope: Scope, prompt_length: int) -> bool:
        """Whether a request with so long a prompt can leave anything for others. Else it needs `private_roots`."""
        return self._keeps(prompt_length) and self.tree.can_enter(scope)

    def private_roots(self, scope: Scope) -> PrivateRoots:
        """For a request that publishes to nobody else; it leaves them when it ends."""
        return PrivateRoots(self.tree, scope)

    def find(self, scope: Scope, tokens: Sequence[int], limit: int, known: Match = NOTHING) -> Match:
        """What the tree has of the first `limit` tokens. Holds and counts nothing. O(limit).

        `known` is what was found for the same tokens before; what is still there of it is not looked up again.
        """
        return self.tree.match(scope, tokens, limit, known)

    def open(self, scope: Scope, found: Match, own: PrivateRoots | None = None) -> SequenceBlocks:
        """A sequence that begins with what was found a moment ago: nothing may have left the tree since. O(blocks).

        It publishes for all who find the scope, or below `own`. Rows of a block that agrees in part are copied, unless
        no block is left to copy them to.
        """
        # To enter a scope may drop idle roots, but only where the scope has none, and then nothing was found in it.
        root = self.tree.enter(scope) if own is None else own.enter(found.path)
        sequence = SequenceBlocks(self.pool, self.tree, self._evictor, self._sequences, root=root, path=found.path)
        try:
            sequence.begin(found)
        except BaseException:
            sequence.release()
            raise
        return sequence

    def count(self, sequence: SequenceBlocks) -> None:
        """Counts what a request found; once for each, however often its samples are opened."""
        self.tree.hit(sequence.found)
        self._copied_tokens += sequence.copied_tokens

    def match(self, scope: Scope, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are there, of all but the last. Holds and counts nothing."""
        return self.tree.match(scope, prompt, len(prompt) - 1).length

    def covers(self, scope: Scope, tokens: Sequence[int]) -> int:
        """As `match`, but all of the tokens may be found, the last one too. As many a pin would hold."""
        return self.tree.match(scope, tokens, len(tokens)).length

    def keepable(self, length: int) -> int:
        """How many tokens of a prompt of this length stay in the tree: `covers` when it has all that it can have.

        The others fill too little of a block to be worth copying, or the prompt is too short to be published.
        """
        if not self._keeps(length):
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

    def describe(
        self, namespace: str | None, max_branches: int, requests: Iterable[Iterable[Node]] = ()
    ) -> list[Branch]:
        """The largest branches of a namespace, or of all for None. O(nodes).

        `requests` are the nodes that each running request reads, to count who runs on a branch.
        """
        return describe(self.tree, namespace, max_branches, self._clock(), requests)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-tokens // self.block_size)

    def can_admit(self, found: Match, length: int) -> bool:
        """Whether a sequence that is opened now on what was found could reserve `length` tokens.

        Blocks that sequences or pins hold cost nothing; those that it finds idle are as good as evicted.
        """
        held = sum(node.is_held for node in found.path)
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

    def _keeps(self, prompt_length: int) -> bool:
        return self._limits.prefix_cache and prompt_length >= self._limits.min_cached_tokens
