"""The prefix tree's nodes, and the questions that siblings answer.

Siblings stand in the order of their tokens. Those that agree longest with a wanted block are then the neighbours of
the place where it would stand, so one bisection finds the exact child, the best partial one, the one that begins with
the wanted tokens, and the one that they begin with. Tokens themselves are compared, never hashes.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

Tokens = tuple[int, ...]

NO_BLOCK: Final = -1
"""The block of a root, which holds no tokens."""

ROOT_SERIAL: Final = 0


class Scope(NamedTuple):
    """What two requests must have in common to share blocks. Compared as a tuple, so no two scopes collide."""

    namespace: str
    model_version: str
    attention: str


@dataclass(slots=True, eq=False)
class Node:
    """One block of a prefix. Written by `PrefixTree` alone."""

    tokens: Tokens
    block: int
    start: int
    """Position of the first token."""
    root: "Root"
    parent: "Node | None"
    """None once the node has left the tree, and for roots."""
    serial: int
    """Names the node for as long as the process runs; that of roots is 0."""
    last_use: int = 0
    """Reading of the tree's logical clock. Nodes used together read the same, and idle ones never after a parent."""
    used_at: float = 0.0
    """Seconds of the tree's other clock, read at the same time."""
    references: int = 0
    """How many sequences read it."""
    pins: int = 0
    """How many pins hold it."""
    hits: int = 0
    """How many requests found it here."""
    children: "list[Node]" = field(default_factory=list)
    """In the order of their tokens."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def is_held(self) -> bool:
        """Whether a sequence reads it or a pin holds it. If not, nothing below is held either."""
        return bool(self.references or self.pins)

    @property
    def is_idle_leaf(self) -> bool:
        """Whether it may leave the tree next."""
        return not self.is_held and not self.children and self.parent is not None

    def place_of(self, tokens: Tokens) -> int:
        """Where among the children these tokens stand, or would. O(log children) comparisons."""
        return bisect_left(self.children, tokens, key=_tokens_of)

    def closest_child(self, wanted: Tokens) -> "tuple[Node | None, int]":
        """The child that agrees longest with the wanted tokens, and on how many. O(log children + tokens)."""
        place = self.place_of(wanted)
        if place < len(self.children) and self.children[place].tokens == wanted:
            return self.children[place], len(wanted)
        best: Node | None = None
        agreed = 0
        for child in self.children[max(place - 1, 0) : place + 1]:
            if (common := common_length(child.tokens, wanted)) > agreed:
                best, agreed = child, common
        return best, agreed

    def walk(self) -> "Iterator[Node]":
        """The node and all below it, parents first. Not recursive: prompts are deeper than Python's stack."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children)


class Root(Node):
    """Where the prefixes of one scope begin. It has no block; its references are those who publish below it.

    Nobody finds an anonymous root by its scope. Its nodes go with the last who is in it, and those that sequences
    read then go with their last reader.
    """

    __slots__ = ("anonymous", "scope")

    def __init__(self, scope: Scope, *, start: int = 0, anonymous: bool = False) -> None:
        super().__init__(tokens=(), block=NO_BLOCK, start=start, root=self, parent=None, serial=ROOT_SERIAL)
        self.scope = scope
        self.anonymous = anonymous


class Match(NamedTuple):
    """What the tree has of a prompt: whole blocks to share, then the first `rows` rows of one more to copy."""

    path: Sequence[Node]
    source: Node | None
    rows: int

    @property
    def length(self) -> int:
        """How many tokens that is."""
        return (self.path[-1].end if self.path else 0) + self.rows


NOTHING: Final = Match((), None, 0)


def _tokens_of(node: Node) -> Tokens:
    return node.tokens


def common_length(left: Tokens, right: Tokens) -> int:
    """How many first tokens two blocks have in common."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
