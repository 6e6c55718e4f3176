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
  references nobody reads either, and it may go, deepest first. Pins hold nodes in the same way.
- Nobody comes upon an anonymous root; it lasts, with what is below it, for those who are in it or read of it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from executor.kv.node import NOTHING, ROOT_SERIAL, Match, Node, Root, Scope, Tokens
from executor.kv.pool import BlockPool, IntegrityError
from executor.kv.roots import Roots


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_idle` is told of each leaf that nobody holds any more, and of each idle node that becomes a leaf.

        `max_roots` bounds the first blocks below one root too: a fork there is a new conversation, not a branch of one.
        `clock` gives the seconds that nodes are stamped with when they are used.
        """
        self._pool = pool
        self._min_copy_tokens = min_copy_tokens
        self._max_children = max_children
        self._max_roots = max_roots
        self._on_idle = on_idle
        self._clock = clock
        self._ticks = 0
        self._serials = count(ROOT_SERIAL + 1)
        self.roots = Roots()
        self.nodes = 0
        self.tokens = 0
        self.referenced = 0
        """Nodes that somebody reads."""
        self.pinned = 0
        """Nodes that pins hold …"""
        self.pinned_idle = 0
        """… and of these the ones that nobody reads."""
        self.held: Counter[str] = Counter()
        """Blocks by namespace."""
        self.evicted_blocks = 0
        self.pruned_branches = 0

    # Roots

    def enter(self, scope: Scope) -> Root:
        """The scope's root, to publish below it; `leave` it in the end.

        At the limit of roots the least recently entered idle one goes. When none is idle, the new one is anonymous.
        """
        if self.roots.find(scope) is None and self.roots.found >= self._max_roots:
            idle = self.roots.idle()
            if idle is None:
                return self.roots.enter_anonymous(scope)
            for child in list(idle.children):  # with the last of them it goes
                self.remove(child)
                self.pruned_branches += 1
        return self.roots.enter(scope)

    def can_enter(self, scope: Scope) -> bool:
        """Whether others would find what is published below the root that `enter` gives now."""
        room = self.roots.find(scope) is not None or self.roots.found < self._max_roots
        return room or self.roots.idle() is not None

    def leave(self, root: Root) -> None:
        """Ends one entering of a root. With the last who was in an anonymous one goes what nobody reads below it."""
        root.references -= 1
        if root.anonymous and not root.references:
            self._drop_idle(root)
        self.roots.drop_if_empty(root)

    def walk(self) -> Iterator[Node]:
        """Every node, parents before children."""
        for root in self.roots:
            yield from (node for node in root.walk() if node is not root)

    @property
    def evictable(self) -> int:
        """Nodes that neither sequences nor pins hold."""
        return self.nodes - self.referenced - self.pinned_idle

    # Reading

    def match(self, scope: Scope, tokens: Sequence[int], limit: int, known: Match = NOTHING) -> Match:
        """What the scope's root has of the first `limit` tokens. Holds nothing. O(limit).

        `known` is what an earlier look found for the same tokens: what is still there of that is not looked up again.
        """
        root = self.roots.find(scope)
        if root is None:
            return NOTHING
        depth = len(known.path)
        while depth and (known.path[depth - 1].root is not root or known.path[depth - 1].parent is None):
            depth -= 1
        path = known.path[:depth]
        below = self.descend(path[-1] if path else root, tokens, limit)
        return Match([*path, *below.path], below.source, below.rows)

    def descend(self, node: Node, tokens: Sequence[int], limit: int) -> Match:
        """What is below a node of `tokens[node.end : limit]`.

        Goes down block by block as far as whole blocks agree, then asks who agrees longest on what comes next.
        """
        size = self._pool.block_size
        path: list[Node] = []
        position = node.end
        while position < limit:
            wanted = tuple(tokens[position : min(position + size, limit)])
            child, agreed = node.closest_child(wanted)
            if child is None or agreed < size:
                return Match(path, child, agreed) if agreed >= self._min_copy_tokens else Match(path, None, 0)
            path.append(child)
            node, position = child, position + size
        return Match(path, None, 0)

    def hit(self, nodes: Sequence[Node]) -> None:
        """A request found these nodes."""
        for node in nodes:
            node.hits += 1

    def acquire(self, nodes: Sequence[Node]) -> None:
        """One more reader of each node, who reads their parents too."""
        self._touch(nodes)
        for node in nodes:
            if not node.references:
                self.referenced += 1
                self.pinned_idle -= bool(node.pins)
            node.references += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """Ends one `acquire` of each node; parents stand before children, as in a path."""
        self._touch(nodes)
        for node in reversed(nodes):
            node.references -= 1
            if node.references:
                continue
            self.referenced -= 1
            self.pinned_idle += bool(node.pins)
            if node.root.anonymous and not node.root.references:
                self._unlink(node)
            elif node.is_idle_leaf:
                self._on_idle(node)

    def pin(self, nodes: Sequence[Node]) -> None:
        """One more pin holds these nodes and all above them. A use, as far as eviction is concerned."""
        self._touch(nodes)
        for node in nodes:
            if not node.pins:
                self.pinned += 1
                self.pinned_idle += not node.references
            node.pins += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Ends one `pin` of each node; parents stand before children, as in a path. Not a use."""
        for node in reversed(nodes):
            node.pins -= 1
            if node.pins:
                continue
            self.pinned -= 1
            self.pinned_idle -= not node.references
            if node.is_idle_leaf:
                self._on_idle(node)

    # Growing and shrinking

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """The child of `parent` that begins with `tokens`: one that is there already, or a new one.

        A new one takes `block`, which must be private; else the block stays the caller's. A partial leaf that the
        tokens begin with, and that nobody reads, grows into them; its pins hold on. (Either is a neighbour of the place
        where they would stand: see node.py.) The caller reads `parent`, or has entered it, and acquires the node next.
        O(log children); at the limit of children O(children).
        """
        place = parent.place_of(tokens)
        if place < len(parent.children):
            follower = parent.children[place]
            if follower.tokens[: len(tokens)] == tokens:
                return follower
        if place > 0:
            leader = parent.children[place - 1]
            if not leader.references and tokens[: len(leader.tokens)] == leader.tokens:
                return self._grow(leader, tokens, block)
        node = Node(tokens, block, parent.end, parent.root, parent, next(self._serials))
        self._touch([node])
        self._pool.publish(block)
        parent.children.insert(place, node)
        self.nodes += 1
        self.tokens += len(tokens)
        self.held[node.root.scope.namespace] += 1
        self._prune(parent, newest=node)
        return node

    def keeps_partial(self, root: Root, tokens: Tokens) -> bool:
        """Whether a partial leaf of these tokens could ever be found. Others would only push useful blocks out."""
        alone = root.anonymous and root.references == 1
        return not alone and len(tokens) >= self._min_copy_tokens

    def remove(self, top: Node) -> None:
        """Takes an idle node and all below it out, and frees their blocks. O(nodes removed).

        Raises IntegrityError if it is held.
        """
        parent = top.parent
        if top.is_held or parent is None:
            raise IntegrityError(f"the node at {top.start} is held, or not in the tree")
        for node in reversed(list(top.walk())):
            self._unlink(node)
            self.evicted_blocks += 1
        if parent.is_idle_leaf:
            self._on_idle(parent)

    def forget(self, root: Root) -> int:
        """Nobody finds what is below this root any more. Returns how many blocks that freed at once.

        What sequences read, and what they publish from now on, goes with them: the root becomes anonymous. Nothing
        below it may be pinned. O(nodes below it).
        """
        freed = self._drop_idle(root)
        if root.references or root.children:  # else it went with the last of them
            self.roots.forget(root)
        return freed

    # Details

    def _touch(self, nodes: Sequence[Node]) -> None:
        """Stamps nodes that are used together with one reading of both clocks."""
        self._ticks += 1
        now = self._clock()
        for node in nodes:
            node.last_use = self._ticks
            node.used_at = now

    def _grow(self, leaf: Node, tokens: Tokens, block: int) -> Node:
        """Exchanges a partial leaf's block for one with more of the same."""
        self._pool.publish(block)
        self._pool.withdraw(leaf.block)
        self.tokens += len(tokens) - len(leaf.tokens)
        leaf.tokens = tokens
        leaf.block = block
        self._touch([leaf])
        return leaf

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
        self.roots.drop_if_empty(leaf.root)

    def _drop_idle(self, root: Root) -> int:
        """Takes all out that nobody reads below a root. Returns how many nodes that were."""
        idle = [node for node in root.walk() if node is not root and not node.references]
        for node in reversed(idle):
            self._unlink(node)
        return len(idle)

    def _prune(self, parent: Node, *, newest: Node) -> None:
        """Drops the least recently used idle branch below a node that has too many children."""
        most = self._max_roots if parent is parent.root else self._max_children
        if len(parent.children) <= most:
            return
        idle = [child for child in parent.children if not child.is_held and child is not newest]
        if idle:
            self.remove(min(idle, key=lambda child: child.last_use))
            self.pruned_branches += 1
