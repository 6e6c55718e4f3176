"""What one request keeps to itself: prefixes that its own samples find again, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from executor.kv.node import Match, Node, Root, Scope
from executor.kv.tree import PrefixTree


class PrivateRoots:
    """The roots below which a request publishes that writes nothing for others. Owned by the engine's thread.

    Each stands where the part of a prompt that was found ended when a sample began, so there may be several. What is
    below them is evicted like anything else while nobody reads it, and goes when the request leaves.
    """

    def __init__(self, tree: PrefixTree, scope: Scope) -> None:
        self._tree = tree
        self._scope = scope
        self._roots: dict[int, Root] = {}

    def extend(self, found: Match, tokens: Sequence[int], limit: int) -> Match:
        """The longest of what others published, as found, and what goes on from a part of that below these roots."""
        return max((found, *(self._below(root, found, tokens, limit) for root in self._roots.values())), key=_length)

    def enter(self, path: Sequence[Node]) -> Root:
        """The root below which a sequence publishes that begins with this path. `PrefixTree.leave` it in the end."""
        if path and path[-1].root in self._roots.values():
            return self._tree.roots.join(path[-1].root)
        start = path[-1].end if path else 0
        if start not in self._roots:
            self._roots[start] = self._tree.roots.enter_anonymous(self._scope, start=start)
        return self._tree.roots.join(self._roots[start])

    def leave(self) -> None:
        """The request ended. Its sequences may still be there. Idempotent."""
        for root in self._roots.values():
            self._tree.leave(root)
        self._roots.clear()

    def _below(self, root: Root, found: Match, tokens: Sequence[int], limit: int) -> Match:
        """What is below a root, behind as much of what was found as leads to it."""
        path = [node for node in found.path if node.end <= root.start]
        if (path[-1].end if path else 0) < root.start:  # others' part of it was evicted
            return found
        below = self._tree.descend(root, tokens, limit)
        return Match([*path, *below.path], below.source, below.rows)


def _length(found: Match) -> int:
    return found.length
