"""One running sequence's blocks: a path of the tree that it shares, then blocks of its own that it writes.

    table   [ 7 | 8 | 9 ]  [ 31 | 32 | 33 ]      physical block of each logical block
              path           private
            in the tree,    written by this
            read only       sequence alone

After each step that succeeded, `publish` moves the line between the two: private blocks that filled join the tree.
Copy-on-write happens once, at the start: where the tree agrees on a part of a block only, those rows are copied to
the first private block, and the shared one is never written. A fork starts in the same way on what its source has.
"""

from collections.abc import Sequence

from executor.kv.eviction import Evictor
from executor.kv.node import Match, Node, Root, Tokens
from executor.kv.pool import BlockPool
from executor.kv.tree import PrefixTree


class SequenceBlocks:
    """The blocks of one sequence, from its admission to its end. Made by `KVCache.open`, or as a `fork` of another.

    Owned by the engine's thread. `table` and `path` are live: read them after `reserve` and before `publish`, and
    change neither.
    """

    __slots__ = (
        "_evictor",
        "_open",
        "_pool",
        "_root",
        "_tree",
        "cached_tokens",
        "copied_tokens",
        "found",
        "path",
        "table",
    )

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        evictor: Evictor,
        sequences: "set[SequenceBlocks]",
        *,
        root: Root,
        path: Sequence[Node],
    ) -> None:
        """Reads the nodes of `path` from now on, and publishes below them, or below `root` where that is another's.

        `root` was entered, and is left in the end. `sequences` holds all open ones, and this one until its release.
        """
        self._pool = pool
        self._tree = tree
        self._evictor = evictor
        self._open = sequences
        self._root = root
        self.path: list[Node] = list(path)
        """The nodes it reads, one for each of the first blocks of its table."""
        self.table: list[int] = [node.block for node in path]
        """Physical block of each logical block: position p is in slot `table[p // size] * size + p % size`."""
        self.cached_tokens = 0
        """Tokens at the beginning that the tree had. None for a fork, which asked for nothing."""
        self.copied_tokens = 0
        """Of these the last, whose rows were copied from a block that agrees in part."""
        self.found: Sequence[Node] = ()
        """The nodes that had them."""
        tree.acquire(self.path)
        sequences.add(self)

    @property
    def shared(self) -> int:
        """How many blocks at the head of the table are the tree's."""
        return len(self.path)

    @property
    def reserved(self) -> int:
        """How many tokens have slots."""
        return len(self.table) * self._pool.block_size

    @property
    def is_open(self) -> bool:
        """False once it was released."""
        return self in self._open

    @property
    def findable(self) -> bool:
        """Whether others find what it publishes."""
        return not self._root.anonymous

    def begin(self, found: Match) -> None:
        """Before anything is reserved: its path is what a request found, and the rows of one more block are copied.

        Does without those where no block is left to copy them to: a request that is alone must not wait for itself.
        """
        self.cached_tokens = self.reserved
        self.found = tuple(self.path)
        if found.source is not None:
            self._copy_on_write(found.source, found.rows)

    def fork(self, tokens: Sequence[int], computed: int) -> "SequenceBlocks":
        """Another sequence that has `tokens[:computed]` too, and goes on from there on its own.

        Publishes first, as `publish` does, so that all full blocks are shared, below an anonymous root too. The rows
        of the block that has not filled are copied to a private one. O(blocks). Raises OutOfBlocks where there is none,
        and then there is no fork and nothing was evicted; ValueError as `publish` does.
        """
        self.publish(tokens, computed)
        root = self._tree.roots.join(self._root)
        fork = SequenceBlocks(self._pool, self._tree, self._evictor, self._open, root=root, path=self.path)
        rows = computed - fork.reserved
        try:
            if rows > 0:
                fork._copy(self.table[self.shared], rows)
        except BaseException:
            fork.release()
            raise
        return fork

    def reserve(self, length: int) -> None:
        """Sees to it that positions 0 … length - 1 have slots, evicting what must go for that. O(blocks added).

        Raises OutOfBlocks, and then has changed nothing; ValueError after the release.
        """
        self._require_open()
        missing = -(-length // self._pool.block_size) - len(self.table)
        if missing > 0:
            self._evictor.make_room(missing)
            for _ in range(missing):
                self.table.append(self._pool.allocate(self.table[-1] if self.table else None))

    def publish(self, tokens: Sequence[int], computed: int) -> None:
        """The step succeeded: keys and values of `tokens[:computed]` are in their slots. O(1) when no block filled.

        `tokens` is the prompt and what was sampled since. Full blocks join the tree; where it holds the same tokens
        already, the sequence moves to that block, and its own is freed. Raises ValueError for a computed length that
        has no tokens or slots, and after the release.
        """
        self._require_open()
        if computed > min(len(tokens), self.reserved):
            raise ValueError(f"{computed} computed tokens, of {len(tokens)} with slots for {self.reserved}")
        size = self._pool.block_size
        while (end := (len(self.path) + 1) * size) <= computed:
            self._share(tuple(tokens[end - size : end]))

    def finish(self, tokens: Sequence[int], computed: int) -> None:
        """The end, of a cancelled sequence too: publishes what was computed, the last partial block with it.

        Idempotent: does nothing after the release. Raises ValueError as `publish` does.
        """
        if not self.is_open:
            return
        self.publish(tokens, computed)
        tail = tuple(tokens[len(self.path) * self._pool.block_size : computed])
        if self._tree.keeps_partial(self._root, tail):
            self._share(tail)
        self.release()

    def release(self) -> None:
        """Gives everything back and publishes nothing more. Idempotent."""
        if not self.is_open:
            return
        self._open.discard(self)
        for block in self.table[len(self.path) :]:
            self._pool.free(block)
        self._tree.release(self.path)
        self._tree.leave(self._root)
        self.table.clear()
        self.path.clear()

    def _copy_on_write(self, source: Node, rows: int) -> None:
        """The source is held meanwhile, so that making room does not evict it."""
        self._tree.acquire([source])
        try:
            if self._evictor.available_blocks:
                self._copy(source.block, rows)
                self.copied_tokens = rows
                self.cached_tokens += rows
                self.found = (*self.path, source)
        finally:
            self._tree.release([source])

    def _copy(self, block: int, rows: int) -> None:
        """Gets the next block, and copies the first rows of another one to it."""
        self.reserve(self.reserved + rows)
        self._pool.copy_rows(block, self.table[-1], rows)

    def _share(self, tokens: Tokens) -> None:
        """The first private block holds these tokens, and joins the tree or gives way to the one that is there."""
        index = len(self.path)
        parent = self.path[-1] if index and self.path[-1].root is self._root else self._root
        own = self.table[index]
        node = self._tree.insert(parent, tokens, own)
        self._tree.acquire([node])
        self.path.append(node)
        self.table[index] = node.block  # first, so that no table points at a block that somebody else may get
        if node.block != own:
            self._pool.free(own)

    def _require_open(self) -> None:
        if not self.is_open:
            raise ValueError("the sequence was released")
