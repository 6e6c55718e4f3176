"""Proofs that pool, tree and sequences agree. They read everything, so they are for tests and for an engine at rest."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from executor.kv.node import ROOT_SERIAL, Node
from executor.kv.pins import Pins
from executor.kv.pool import BlockPool, BlockState, IntegrityError
from executor.kv.sequence import SequenceBlocks
from executor.kv.tree import PrefixTree


def check_tree(tree: PrefixTree, pool: BlockPool) -> None:
    """Proves what the head of tree.py says, and that the tree's counts are true. Raises IntegrityError."""
    nodes = list(tree.walk())
    for node in nodes:
        _check_node(node, pool.block_size)
    blocks = [node.block for node in nodes]
    _require(len(set(blocks)) == len(blocks), "two nodes hold the same block")
    _require(set(blocks) == pool.blocks_in_state(BlockState.TREE), "the pool lists other blocks as the tree's")
    _require(tree.nodes == len(nodes), f"{len(nodes)} nodes, counted as {tree.nodes}")
    _require(tree.tokens == sum(len(node.tokens) for node in nodes), "the count of tokens is wrong")
    _require(tree.referenced == sum(node.references > 0 for node in nodes), "the count of read nodes is wrong")
    _require(tree.held == Counter(node.root.scope.namespace for node in nodes), "blocks by namespace are miscounted")
    serials = {node.serial for node in nodes}
    _require(len(serials) == len(nodes) and ROOT_SERIAL not in serials, "two nodes have one name")
    for parent in (*tree.roots, *nodes):
        for left, right in pairwise(parent.children):
            _require(left.tokens < right.tokens, f"the children of the node at {parent.start} are out of order")
            stored_twice = right.tokens[: len(left.tokens)] == left.tokens
            _require(not stored_twice, f"a child of the node at {parent.start} begins with another")
    for root in tree.roots:
        _require(bool(root.children or root.references), "an empty root was kept")
        read = all(node.references for node in root.walk() if node is not root)
        _require(not root.anonymous or root.references > 0 or read, "an anonymous root was left, and kept")
        found = tree.roots.find(root.scope) is root
        _require(found != root.anonymous, "a root is not found under its scope, or an anonymous one is")


def check_references(tree: PrefixTree, pool: BlockPool, sequences: Iterable[SequenceBlocks]) -> None:
    """Proves that references and private blocks are exactly what the open sequences hold. Raises IntegrityError."""
    readers: Counter[Node] = Counter()
    private: Counter[int] = Counter()
    for sequence in sequences:
        shared = sequence.table[: sequence.shared]
        _require(shared == [node.block for node in sequence.path], "a table and its path name other blocks")
        starts = [node.start for node in sequence.path]
        _require(starts == [i * pool.block_size for i in range(len(starts))], "a path's nodes stand somewhere else")
        readers.update(sequence.path)
        private.update(sequence.table[sequence.shared :])
    for node in tree.walk():
        _require(node.references == readers.pop(node, 0), f"the node at {node.start} is read by others than it counts")
    _require(not readers, "a sequence reads a node that left the tree")
    _require(all(holders == 1 for holders in private.values()), "two sequences write one block")
    _require(set(private) == pool.blocks_in_state(BlockState.PRIVATE), "a private block belongs to no sequence")


def check_pins(tree: PrefixTree, pins: Pins) -> None:
    """Proves that nodes are held by the pins that there are, and within their limit. Raises IntegrityError."""
    holders: Counter[Node] = Counter()
    for path in pins.paths():
        _require(all(upper is lower.parent for upper, lower in pairwise(path)), "a pin holds nodes that are no path")
        _require(not path or path[0].parent is path[0].root, "a pin does not begin at a root")
        _require(not any(node.root.anonymous for node in path), "a pin holds what nobody finds")
        holders.update(path)
    _require(tree.pinned == len(holders), f"{len(holders)} nodes are pinned, counted as {tree.pinned}")
    _require(tree.pinned <= pins.limit, f"{tree.pinned} blocks are pinned, and {pins.limit} may be")
    idle = sum(not node.references for node in holders)
    _require(tree.pinned_idle == idle, f"{idle} pinned nodes are not read, counted as {tree.pinned_idle}")
    for node in tree.walk():
        _require(node.pins == holders.pop(node, 0), f"the node at {node.start} is pinned by others than it counts")
    _require(not holders, "a pin holds a node that left the tree")


def _check_node(node: Node, block_size: int) -> None:
    parent = node.parent
    if parent is None:
        raise IntegrityError(f"the node at {node.start} is listed by a parent that it does not know")
    _require(node in parent.children and node.root is parent.root, "a child and its parent do not agree")
    _require(node.start == parent.end, f"the node at {node.start} does not follow its parent")
    _require(0 < len(node.tokens) <= block_size, f"the node at {node.start} holds {len(node.tokens)} tokens")
    _require(len(node.tokens) == block_size or not node.children, "a partial node has children")
    if parent is not node.root:
        _require(parent.references >= node.references, f"the node at {node.start} has more readers than its parent")
        idle = not parent.references
        _require(not idle or parent.last_use >= node.last_use, f"the node at {node.start} was used after its parent")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)
