"""What one request keeps to itself: prefixes that its own samples find again, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from executor.kv.node import Match, Node, Root, Scope
from executor.kv.tree import PrefixTree


class PrivateRoots:
    """The roots below which a request publishes that writes nothing for others. Owned by the engine's thread.

    Each goes on from the node at which the part that was found ended when a sample began, so there may be several. What
    is below them is evicted like anything else while nobody reads it, and goes when the request leaves.
    """

    def __init__(self, tree: PrefixTree, scope: Scope) -> None:
        self._tree = tree
        self._scope = scope
        self._roots: dict[Node | None, Root] = {}
        """By the node that they go on from; None is the beginning. Its place alone would not tell what leads there."""

    def extend(self, found: Match, tokens: Sequence[int], limit: int) -> Match:
        """The longest of what others published, as found, and what goes on from a part of that below these roots."""
        others = (self._below(last, root, found, tokens, limit) for last, root in self._roots.items())
        return max((found, *others), key=_length)

    def enter(self, path: Sequence[Node]) -> Root:
        """The root below which a sequence publishes that begins with this path. `PrefixTree.leave` it in the end."""
        last = path[-1] if path else None
        if last is not None and last.root in self._roots.values():
            return self._tree.roots.join(last.root)
        if last not in self._roots:
            self._roots[last] = self._tree.roots.enter_anonymous(self._scope, start=last.end if last else 0)
        return self._tree.roots.join(self._roots[last])

    def leave(self) -> None:
        """The request ended. Its sequences may still be there. Idempotent."""
        for root in self._roots.values():
            self._tree.leave(root)
        self._roots.clear()

    def _below(self, last: Node | None, root: Root, found: Match, tokens: Sequence[int], limit: int) -> Match:
        """What is below a root, behind as much of what was found as leads to it; else what was found."""
        path = [node for node in found.path if node.end <= root.start]
        if (path[-1] if path else None) is not last:
            return found
        below = self._tree.descend(root, tokens, limit)
        return Match([*path, *below.path], below.source, below.rows)


def _length(found: Match) -> int:
    return found.length
