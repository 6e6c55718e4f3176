"""A pool whose rows can be read as numbers, and a stand-in for the model that writes recognisable ones."""

import zlib
from collections.abc import Callable, Sequence

import pytest
import torch

from executor.kv.cache import KVCache
from executor.kv.eviction import KVLimits
from executor.kv.node import NOTHING, Match, Scope
from executor.kv.pool import BlockPool, KVLayout
from executor.kv.private import PrivateRoots
from executor.kv.sequence import SequenceBlocks

ONE_NUMBER = KVLayout(layers=2, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
EXACT_IN_FLOAT32 = 1 << 23


def scope(namespace: str = "a") -> Scope:
    return Scope(namespace, "model", "full")


def key_of(tokens: Sequence[int], position: int) -> int:
    """The key that a model would compute there: it depends on all tokens up to the position, and on nothing else."""
    return zlib.crc32(repr(tuple(tokens[: position + 1])).encode()) % EXACT_IN_FLOAT32 + 1


class Runner:
    """Does to a cache what an engine does: opens, computes, publishes, and reads back what it should find."""

    def __init__(self, pool: BlockPool, limits: KVLimits) -> None:
        self.cache = KVCache(pool, limits, clock=lambda: self.now)
        self.now = 0.0

    def find(self, prompt: Sequence[int], *, namespace: str = "a", read: bool = True) -> Match:
        """What a request finds: all of its prompt but for the last token, or nothing."""
        return self.cache.find(scope(namespace), prompt, len(prompt) - 1) if read else NOTHING

    def open(
        self, prompt: Sequence[int], *, namespace: str = "a", read: bool = True, write: bool = True
    ) -> SequenceBlocks:
        """The only sequence of a request."""
        found = self.find(prompt, namespace=namespace, read=read)
        if write and self.cache.publishes(scope(namespace), len(prompt)):
            return self.enter(prompt, found, namespace=namespace)
        own = self.cache.private_roots(scope(namespace))
        blocks = self.enter(prompt, found, own, namespace=namespace)
        own.leave()
        return blocks

    def enter(
        self, prompt: Sequence[int], found: Match, own: PrivateRoots | None = None, *, namespace: str = "a"
    ) -> SequenceBlocks:
        """Opens on what was found, and counts that."""
        blocks = self.cache.open(scope(namespace), found, own)
        self.cache.count(blocks)
        self.verify(blocks, prompt, blocks.cached_tokens)
        return blocks

    def compute(self, blocks: SequenceBlocks, tokens: Sequence[int], start: int, end: int) -> None:
        """A forward over positions [start, end), whose slots are reserved: writes private blocks alone."""
        size = self.cache.block_size
        for position in range(start, end):
            assert position // size >= blocks.shared, "a block that others read would be written"
            slot = blocks.table[position // size] * size + position % size
            for layer, (keys, values) in enumerate(zip(self.cache.pool.keys, self.cache.pool.values, strict=True)):
                keys[slot] = key_of(tokens, position) + layer
                values[slot] = -key_of(tokens, position) - layer

    def verify(self, blocks: SequenceBlocks, tokens: Sequence[int], computed: int) -> None:
        """Every row up to the computed length is what these tokens demand."""
        size = self.cache.block_size
        for position in range(computed):
            slot = blocks.table[position // size] * size + position % size
            for layer, (keys, values) in enumerate(zip(self.cache.pool.keys, self.cache.pool.values, strict=True)):
                assert keys[slot].item() == key_of(tokens, position) + layer
                assert values[slot].item() == -key_of(tokens, position) - layer

    def fork(self, source: SequenceBlocks, tokens: Sequence[int], computed: int) -> SequenceBlocks:
        """A fork that has what its source computed, and takes no more than the block that has not filled."""
        available = self.cache.available_blocks
        fork = source.fork(tokens, computed)
        self.cache.check()
        self.verify(fork, tokens, computed)
        assert available - self.cache.available_blocks <= bool(computed % self.cache.block_size)
        assert fork.table[: fork.shared] == source.table[: fork.shared]
        return fork

    def extend(self, blocks: SequenceBlocks, tokens: Sequence[int], start: int) -> None:
        """Goes on from position `start` to the end of the tokens."""
        blocks.reserve(len(tokens))
        self.compute(blocks, tokens, start, len(tokens))
        blocks.publish(tokens, len(tokens))
        self.verify(blocks, tokens, len(tokens))
        self.cache.check()

    def begin(
        self, tokens: Sequence[int], *, namespace: str = "a", read: bool = True, write: bool = True
    ) -> SequenceBlocks:
        """Opens on the tokens as a prompt, computes them all and publishes their full blocks."""
        blocks = self.open(tokens, namespace=namespace, read=read, write=write)
        self.extend(blocks, tokens, blocks.cached_tokens)
        return blocks

    def run(self, tokens: Sequence[int], *, namespace: str = "a", read: bool = True, write: bool = True) -> int:
        """A request from beginning to end. Returns its cached tokens."""
        blocks = self.begin(tokens, namespace=namespace, read=read, write=write)
        cached = blocks.cached_tokens
        blocks.finish(tokens, len(tokens))
        self.cache.check()
        return cached


MakeRunner = Callable[..., Runner]


@pytest.fixture
def make_runner() -> MakeRunner:
    """`make_runner(blocks=…, block_size=…, **limits)`: a runner on a cache with so many usable blocks."""

    def make(*, blocks: int = 32, block_size: int = 4, **limits: object) -> Runner:
        chosen = {"min_copy_tokens": 1, **limits}
        return Runner(BlockPool(ONE_NUMBER, blocks + 1, block_size), KVLimits(**chosen))  # type: ignore[arg-type]

    return make
