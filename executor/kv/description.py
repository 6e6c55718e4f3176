"""The tree as people look at it: its branches, the largest first."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from executor.kv.node import Node, Tokens
from executor.kv.tree import PrefixTree

HEAD_TOKENS: Final = 8
"""Enough to tell the beginnings of two prompts apart by eye."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of the tree without a fork in it: what all that go on from it have in common."""

    id: int
    """The first node's serial number: the same for as long as the branch begins there."""
    parent_id: int
    """The branch that it hangs on; 0 is a root."""
    namespace: str
    start: int
    """Position of its first token."""
    tokens: int
    children: int
    """Branches that go on from its end."""
    running: int
    """Requests that read it, or its beginning."""
    hits: int
    """Requests that found it, or its beginning."""
    idle: float
    """Seconds since it was last used; 0 while it is read."""
    pinned: bool
    head: Tokens
    """Its first tokens, HEAD_TOKENS at most."""


def describe(
    tree: PrefixTree, namespace: str | None, max_branches: int, now: float, requests: Iterable[Iterable[Node]]
) -> list[Branch]:
    """The branches that requests can find, those with most tokens first. O(nodes).

    `now` is the tree's clock. `requests` are the nodes that each request reads; one may come twice.
    """
    readers = Counter(node for nodes in requests for node in set(nodes))
    return nlargest(max_branches, _branches(tree, namespace, now, readers), key=lambda branch: branch.tokens)


def _branches(tree: PrefixTree, namespace: str | None, now: float, readers: Counter[Node]) -> Iterator[Branch]:
    waiting = [(child, root.serial) for root in tree.roots.of(namespace) for child in root.children]
    while waiting:
        first, parent_id = waiting.pop()
        last = first
        while len(last.children) == 1:
            last = last.children[0]
        waiting.extend((child, first.serial) for child in last.children)
        yield _branch(first, last, parent_id, now, readers[first])


def _branch(first: Node, last: Node, parent_id: int, now: float, readers: int) -> Branch:
    """The first node tells for all: who reads, finds, uses or pins one of the others does so to it."""
    return Branch(
        id=first.serial,
        parent_id=parent_id,
        namespace=first.root.scope.namespace,
        start=first.start,
        tokens=last.end - first.start,
        children=len(last.children),
        running=readers,
        hits=first.hits,
        idle=0.0 if first.references else max(now - first.used_at, 0.0),
        pinned=first.pins > 0,
        head=first.tokens[:HEAD_TOKENS],
    )
