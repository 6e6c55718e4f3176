"""The prefix tree: which blocks hold the keys and values of which tokens.

A node is one block. The tokens on the way from a root down to a node are a prefix that was computed once, and that
every sequence which begins with it may read:

    root (namespace, model version, attention)
     ├─ [You are a helpful]─┬─[bot. Hello! How]──[are you?]        the last leaf is partial: its block has room left
     │                      └─[bot. Write me a]                    a fork: two conversations, one beginning
     └─ [Translate into En]

What holds always, and what `integrity.check_tree` proves:

- A block in the tree is read-only. Who leaves a block half-way, or goes on from a partial leaf, copies its rows.
- Only a leaf is partial, and one that a sibling begins with is not kept: nothing is stored twice.
- References count the sequences that read a node. Who reads a node reads all above it, so below a node without
  references nobody reads either, and it may go, deepest first.
- Below an anonymous root every node is read by someone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from executor.kv.node import Node, Root, Scope, Tokens
from executor.kv.pool import BlockPool, IntegrityError


class Match(NamedTuple):
    """What the tree has of a prompt: whole blocks to share, then the first `rows` rows of one more to copy."""

    path: list[Node]
    source: Node | None
    rows: int


class PrefixTree:
    """All roots and the nodes below them. Owned by the engine's thread; blocks come from and go back to `pool`."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        min_copy_tokens: int,
        max_children: int,
        max_roots: int,
        on_idle: Callable[[Node], None],
    ) -> None:
        """`on_idle` is told of each leaf that loses its last reader, and of each idle node that becomes a leaf.

        `max_roots` bounds the first blocks below one root too: a fork there is a new conversation, not a branch of one.
        """
        self._pool = pool
        self._min_copy_tokens = min_copy_tokens
        self._max_children = max_children
        self._max_roots = max_roots
        self._on_idle = on_idle
        self._roots: dict[Scope, Root] = {}  # least recently entered first
        self._anonymous: set[Root] = set()
        self._clock = 0
        self.nodes = 0
        self.tokens = 0
        self.referenced = 0
        """Nodes that somebody reads. The others may all be evicted."""
        self.held: Counter[str] = Counter()
        """Blocks by namespace."""
        self.evicted_blocks = 0
        self.pruned_branches = 0

    # Roots

    def find(self, scope: Scope) -> Root | None:
        """The root of a scope, if there is one."""
        return self._roots.get(scope)

    def enter(self, scope: Scope) -> Root:
        """The scope's root, to publish below it; `leave` it in the end.

        At the limit of roots the least recently entered idle one goes. When none is idle, the new one is anonymous.
        """
        root = self._roots.pop(scope, None)
        if root is None:
            if len(self._roots) >= self._max_roots and not self._drop_idle_root():
                return self.enter_anonymous(scope)
            root = Root(scope)
        self._roots[scope] = root
        root.references += 1
        return root

    def enter_anonymous(self, scope: Scope, *, start: int = 0) -> Root:
        """A new root that nobody finds, for blocks from position `start` on; `leave` it in the end."""
        root = Root(scope, start=start, anonymous=True)
        self._anonymous.add(root)
        root.references += 1
        return root

    def leave(self, root: Root) -> None:
        """Ends one `enter`. A root that is empty then goes."""
        root.references -= 1
        self._drop_if_empty(root)

    @property
    def root_count(self) -> int:
        """How many roots there are, anonymous ones too."""
        return len(self._roots) + len(self._anonymous)

    def roots(self) -> list[Root]:
        """All roots: those that can be found, least recently entered first, then the anonymous ones."""
        return [*self._roots.values(), *self._anonymous]

    def walk(self) -> Iterator[Node]:
        """Every node, parents before children."""
        for root in self.roots():
            yield from (node for node in root.walk() if node is not root)

    # Reading

    def match(self, root: Root, prompt: Sequence[int]) -> Match:
        """Walks down block by block as far as whole blocks agree, then asks who agrees longest on what comes next.

        Never covers the whole prompt: its last token has to run to give logits. Holds nothing. O(prompt length).
        """
        size, limit = self._pool.block_size, len(prompt) - 1
        path: list[Node] = []
        node: Node = root
        position = 0
        while position < limit:
            wanted = tuple(prompt[position : min(position + size, limit)])
            child, agreed = node.closest_child(wanted)
            if child is None or agreed < size:
                return Match(path, child, agreed) if agreed >= self._min_copy_tokens else Match(path, None, 0)
            path.append(child)
            node, position = child, position + size
        return Match(path, None, 0)

    def hit(self, nodes: Sequence[Node]) -> None:
        """A request found these nodes, and reads them from now on."""
        for node in nodes:
            node.hits += 1
        self.acquire(nodes)

    def acquire(self, nodes: Sequence[Node]) -> None:
        """One more reader of each node, who reads their parents too."""
        now = self._tick()
        for node in nodes:
            self.referenced += not node.references
            node.references += 1
            node.last_use = now

    def release(self, nodes: Sequence[Node]) -> None:
        """Ends one `acquire` of each node; parents stand before children, as in a path."""
        now = self._tick()
        for node in reversed(nodes):
            node.references -= 1
            node.last_use = now
            if node.references:
                continue
            self.referenced -= 1
            if node.root.anonymous:
                self._unlink(node)
            elif node.is_idle_leaf:
                self._on_idle(node)

    # Growing and shrinking

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """The child of `parent` that begins with `tokens`: one that is there already, or a new one.

        A new one takes `block`, which must be private; else the block stays the caller's. An idle partial leaf that
        the tokens begin with is replaced. The caller reads `parent`, or has entered it, and acquires the node next.
        O(log children); at the limit of children O(children).
        """
        place = parent.place_of(tokens)
        if place < len(parent.children):
            follower = parent.children[place]
            if follower.tokens[: len(tokens)] == tokens:
                return follower
        if place > 0:
            leader = parent.children[place - 1]
            if leader.is_idle_leaf and tokens[: len(leader.tokens)] == leader.tokens:
                self._unlink(leader)
                place -= 1
        node = Node(tokens, block, parent.end, parent.root, parent, last_use=self._tick())
        self._pool.publish(block)
        parent.children.insert(place, node)
        self.nodes += 1
        self.tokens += len(tokens)
        self.held[node.root.scope.namespace] += 1
        self._prune(parent, newest=node)
        return node

    def keeps_partial(self, root: Root, tokens: Tokens) -> bool:
        """Whether a partial leaf of these tokens could ever be found. Others would only push useful blocks out."""
        return not root.anonymous and len(tokens) >= self._min_copy_tokens

    def remove(self, top: Node) -> None:
        """Takes an idle node and all below it out, and frees their blocks. O(nodes removed).

        Raises IntegrityError if somebody reads it.
        """
        parent = top.parent
        if top.references or parent is None:
            raise IntegrityError(f"the node at {top.start} is read by {top.references}, or not in the tree")
        for node in reversed(list(top.walk())):
            self._unlink(node)
            self.evicted_blocks += 1
        if parent.is_idle_leaf:
            self._on_idle(parent)

    # Details

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _unlink(self, leaf: Node) -> None:
        """Takes a leaf out and frees its block, whatever becomes of its parent."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise IntegrityError(f"the node at {leaf.start} is no leaf of the tree")
        del parent.children[parent.place_of(leaf.tokens)]
        leaf.parent = None
        self._pool.withdraw(leaf.block)
        self.nodes -= 1
        self.tokens -= len(leaf.tokens)
        namespace = leaf.root.scope.namespace
        self.held[namespace] -= 1
        if not self.held[namespace]:
            del self.held[namespace]
        self._drop_if_empty(leaf.root)

    def _prune(self, parent: Node, *, newest: Node) -> None:
        """Drops the least recently used idle branch below a node that has too many children."""
        most = self._max_roots if parent is parent.root else self._max_children
        if len(parent.children) <= most:
            return
        idle = [child for child in parent.children if not child.references and child is not newest]
        if idle:
            self.remove(min(idle, key=lambda child: child.last_use))
            self.pruned_branches += 1

    def _drop_if_empty(self, root: Root) -> None:
        if root.children or root.references:
            return
        if root.anonymous:
            self._anonymous.discard(root)
        else:
            self._roots.pop(root.scope, None)

    def _drop_idle_root(self) -> bool:
        """Empties, and so drops, the least recently entered root that nobody publishes to or reads below."""
        for root in self._roots.values():
            if not root.references and not any(child.references for child in root.children):
                for child in list(root.children):
                    self.remove(child)
                    self.pruned_branches += 1
                return True
        return False
