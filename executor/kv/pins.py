"""Pins: prefixes that stay for a time, whoever else wants room.

A pin holds nodes of the tree as a running sequence does, so what it holds is never evicted, pruned or dropped with its
root. It ends by time, by name, or with a flush. A partial leaf may grow while it is pinned, and is held on.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from executor.kv.eviction import KVLimits
from executor.kv.node import Node, Scope
from executor.kv.pool import BlockPool
from executor.kv.tree import PrefixTree


class PinLimitError(Exception):
    """A pin would make pins hold more of the pool than they may. Has all numbers, in blocks."""

    def __init__(self, wanted: int, pinned: int, limit: int) -> None:
        super().__init__(f"{wanted} more blocks would be pinned; {pinned} are, and {limit} may be")
        self.wanted = wanted
        self.pinned = pinned
        self.limit = limit


class UnknownPinError(LookupError):
    """No pin of this name: it never was, or has ended."""


@dataclass(frozen=True, slots=True)
class Pin:
    """What a pin is known by, and how many blocks it holds, together with other pins or alone."""

    id: str
    blocks: int


class _Held(NamedTuple):
    """What a pin holds, parents before children, and until when."""

    namespace: str
    until: float
    nodes: tuple[Node, ...]


class Pins:
    """All pins. Owned by the engine's thread."""

    def __init__(self, tree: PrefixTree, pool: BlockPool, limits: KVLimits) -> None:
        self._tree = tree
        self._block_size = pool.block_size
        self._held: dict[str, _Held] = {}
        self._next_end = math.inf  # no pin ends before; may be early, never late
        self.limit = int(limits.max_pinned * pool.usable_blocks)
        """Blocks that pins hold at most, each counted once."""

    @property
    def next_end(self) -> float | None:
        """When the next pin ends, by the clock that `expire` is told; may be early, never late. None without pins."""
        return None if math.isinf(self._next_end) else self._next_end

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, scope: Scope, tokens: Sequence[int], until: float) -> Pin:
        """Holds what the tree has of the tokens until that time, by the clock that `expire` is told. O(tokens).

        That is what `KVCache.covers` counts: the last token too, and the leaf that they end in. Where the tree has
        nothing, the pin holds nothing. Raises PinLimitError where too much would be pinned, and then has changed
        nothing.
        """
        found = self._tree.match(scope, tokens, len(tokens))
        path = [*found.path, found.source] if found.source else found.path
        self._check(sum(not node.pins for node in path))
        self._tree.pin(path)
        pin = Pin(secrets.token_hex(8), len(path))  # no count from 1: an id from before a restart must name nothing
        self._held[pin.id] = _Held(scope.namespace, until, tuple(path))
        self._next_end = min(self._next_end, until)
        return pin

    def check(self, scope: Scope, tokens: Sequence[int]) -> None:
        """Raises PinLimitError where all of these tokens, once the tree has them, could not be pinned. O(tokens)."""
        path, leaf, rows = self._tree.match(scope, tokens, len(tokens))
        pinned = sum(node.pins > 0 for node in path)
        if leaf is not None and rows == min(len(leaf.tokens), len(tokens) - leaf.start):  # theirs, or grows into theirs
            pinned += leaf.pins > 0
        self._check(-(-len(tokens) // self._block_size) - pinned)

    def unpin(self, pin_id: str) -> None:
        """Ends a pin. Raises UnknownPinError where there is none of this name."""
        held = self._held.pop(pin_id, None)
        if held is None:
            raise UnknownPinError(f"there is no pin {pin_id!r}; it may have ended")
        self._tree.unpin(held.nodes)
        if not self._held:
            self._next_end = math.inf

    def expire(self, now: float) -> int:
        """Ends the pins whose time has come, and returns how many. O(1) while there are none, else O(pins)."""
        if now < self._next_end:
            return 0
        ended = [name for name, held in self._held.items() if held.until <= now]
        for name in ended:
            self.unpin(name)
        self._next_end = min((held.until for held in self._held.values()), default=math.inf)
        return len(ended)

    def drop(self, namespace: str | None) -> None:
        """Ends all pins of a namespace, or of all namespaces for None."""
        for name in [name for name, held in self._held.items() if namespace in (None, held.namespace)]:
            self.unpin(name)

    def paths(self) -> Iterator[tuple[Node, ...]]:
        """What each pin holds; for checks."""
        return (held.nodes for held in self._held.values())

    def _check(self, more: int) -> None:
        if self._tree.pinned + more > self.limit:
            raise PinLimitError(more, self._tree.pinned, self.limit)
