"""The pool: the memory for keys and values, cut into blocks, and who holds each block.

A block is `block_size` neighbouring slots; a slot is where one token keeps its keys and values, in every layer at the
same place. Each block is in exactly one state:

    FREE ──allocate──▶ PRIVATE ──publish──▶ TREE
     ▲                    │                   │
     └───────free─────────┴─────withdraw──────┘

A private block belongs to one sequence, which may write it. A block of the tree is read by many and written by none.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from executor.kv.runs import FreeRuns

TRASH_BLOCK: Final = 0
"""The block that padding is written to. It is never allocated, and what it holds means nothing."""

PAGE_BYTES: Final = 4096
BLOCK_SIZES: Final = (16, 32, 64, 128)


class OutOfBlocks(Exception):  # noqa: N818 - a state that callers plan for, like StopIteration
    """The pool has too few blocks that are free or may be freed."""


class IntegrityError(Exception):
    """The bookkeeping contradicts itself: a bug, after which no answer can be trusted."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token keeps: a key and a value of `[kv_heads, head_dim]` in each layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.row_bytes

    def blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """How many blocks fit into this much memory, the trash block among them."""
        return memory_bytes // (self.bytes_per_token * block_size)


def auto_block_size(layout: KVLayout) -> int:
    """The block size in tokens for `block_size = "auto"`.

    On a CPU the smallest of BLOCK_SIZES for which one block of one layer's keys is a whole number of pages. Where none
    is (rows that are no multiple of 32 bytes), and on a GPU, the smallest of all: it shares the most and wastes least.
    """
    if layout.device.type == "cpu":
        for size in BLOCK_SIZES:
            if size * layout.row_bytes % PAGE_BYTES == 0:
                return size
    return BLOCK_SIZES[0]


class BlockState(IntEnum):
    """Who holds a block."""

    FREE = 0
    PRIVATE = 1
    TREE = 2
    TRASH = 3


class BlockPool:
    """Storage of all blocks, and the state of each. Owned by the engine's thread.

    `keys[layer]` and `values[layer]` are `[num_blocks * block_size, kv_heads, head_dim]`, contiguous;
    slot = block * block_size + offset. Every method but `check` is O(1).
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int) -> None:
        """Takes the memory at once. Raises ValueError for fewer than two blocks: one of them is the trash block."""
        if num_blocks <= 1 or block_size < 1:
            raise ValueError(f"a pool needs two blocks and a token in each, not {num_blocks} and {block_size}")
        self.layout: Final = layout
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        # Zeros, not empty: attention multiplies a masked row's value by zero, and zero times a stray NaN is NaN.
        self._rows = torch.zeros(
            (2, layout.layers, num_blocks * block_size, layout.kv_heads, layout.head_dim),
            dtype=layout.dtype,
            device=layout.device,
        )
        self.keys: Final[list[Tensor]] = list(self._rows[0])
        self.values: Final[list[Tensor]] = list(self._rows[1])
        self._states = bytearray(num_blocks)
        self._states[TRASH_BLOCK] = BlockState.TRASH
        self._free = FreeRuns(TRASH_BLOCK + 1, num_blocks - 1)
        self._private_blocks = 0

    @property
    def usable_blocks(self) -> int:
        """All blocks but the trash block."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def private_blocks(self) -> int:
        return self._private_blocks

    @property
    def tree_blocks(self) -> int:
        return self.usable_blocks - self.free_blocks - self.private_blocks

    def state(self, block: int) -> BlockState:
        return BlockState(self._states[block])

    def allocate(self, after: int | None = None) -> int:
        """A free block, now private: the one behind `after` if that is free, so that a sequence stays one run.

        Else one of a long run of free blocks: its first, or its middle where the block before the run is private,
        because the sequence there is about to grow into the run. Raises OutOfBlocks.
        """
        if not self._free:
            raise OutOfBlocks(f"all {self.usable_blocks} blocks are held")
        if after is not None and self._free.starts_at(after + 1):
            block = self._free.take(after + 1)
        else:
            start, length = self._free.long_run()
            crowded = self._states[start - 1] == BlockState.PRIVATE
            block = self._free.take(start, length // 2 if crowded else 0)
        self._states[block] = BlockState.PRIVATE
        self._private_blocks += 1
        return block

    def free(self, block: int) -> None:
        """Takes a private block back. Raises IntegrityError if it is not private."""
        self._move(block, BlockState.PRIVATE, BlockState.FREE)
        self._private_blocks -= 1
        self._free.add(block)

    def publish(self, block: int) -> None:
        """Gives a private block to the tree; nobody writes it from now on. Raises IntegrityError if not private."""
        self._move(block, BlockState.PRIVATE, BlockState.TREE)
        self._private_blocks -= 1

    def withdraw(self, block: int) -> None:
        """Takes a block back from the tree. Raises IntegrityError if it is not the tree's."""
        self._move(block, BlockState.TREE, BlockState.FREE)
        self._free.add(block)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first `rows` slots of block `source` to block `target`, keys and values of all layers.

        Raises IntegrityError unless the target is private: a block that others read is never written.
        """
        if self._states[target] != BlockState.PRIVATE:
            raise IntegrityError(f"block {target} is {self.state(target).name}, and only private blocks are written")
        start, end = source * self.block_size, target * self.block_size
        self._rows[:, :, end : end + rows].copy_(self._rows[:, :, start : start + rows])

    def blocks_in_state(self, state: BlockState) -> set[int]:
        """All blocks in this state. O(blocks); for checks."""
        return {block for block, held in enumerate(self._states) if held == state}

    def check(self) -> None:
        """Proves that states, counts and free runs tell one story. Raises IntegrityError. O(blocks)."""
        runs = self._free.runs()
        listed = [block for start, length in runs for block in range(start, start + length)]
        if set(listed) != self.blocks_in_state(BlockState.FREE) or len(listed) != len(self._free):
            raise IntegrityError("the free runs do not list exactly the free blocks")
        if any(run.start + run.length >= after.start for run, after in pairwise(runs)):
            raise IntegrityError("two free runs touch or overlap")
        if len(self.blocks_in_state(BlockState.PRIVATE)) != self._private_blocks:
            raise IntegrityError("the count of private blocks is wrong")
        if self.blocks_in_state(BlockState.TRASH) != {TRASH_BLOCK}:
            raise IntegrityError("the trash block is not the trash block")

    def _move(self, block: int, held: BlockState, becomes: BlockState) -> None:
        if self._states[block] != held:
            raise IntegrityError(f"block {block} is {self.state(block).name}, not {held.name}")
        self._states[block] = becomes
