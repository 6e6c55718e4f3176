"""Who runs in the next step, and on which tokens: continuous batching with chunked prefill.

Every running sequence that decodes gets its token; what is left of the step's token budget goes to prefill chunks, in
order of arrival, ending on block boundaries. Waiting sequences hold no blocks. One is admitted when what it needs fits
beside what the running ones have been promised. When a running sequence can get no block all the same, the youngest
gives way: it publishes what it has computed, waits at the head of the queue, and picks its blocks up from the tree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from executor.batch import Work
from executor.kv.cache import KVCache
from executor.kv.pool import OutOfBlocks
from executor.requests import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a step and of the queue."""

    max_batch_tokens: int
    """Tokens that a step runs at most; each decoding sequence takes one of them."""
    max_running: int
    max_waiting: int


class Scheduler:
    """Owns which sequences wait and which run; the engine's thread alone calls it."""

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        if limits.max_running > limits.max_batch_tokens:
            raise ValueError("every running sequence must find room for its token in a step")
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival: the last one is the first to give way."""
        self.starved: list[Sequence] = []
        """Sequences of the last `schedule` that have all the pool to themselves and found no block: they end there."""
        self.preemptions = 0
        self._cache = cache
        self._limits = limits

    @property
    def full(self) -> bool:
        """Whether the queue has no room for another sequence."""
        return len(self.waiting) >= self._limits.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind all that wait."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks stay for the caller to release."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Work]:
        """Plans a step: admits, gives blocks to all tokens that are to run, preempts where there are none."""
        self.starved = []
        self._admit()
        plan: dict[int, Work] = {}
        budget = self._limits.max_batch_tokens
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        for sequence in decoding + prefilling:
            count = self._chunk(sequence, budget)
            if count and self._reserve(sequence, count, plan):
                plan[id(sequence)] = Work(sequence, sequence.computed, count)
                budget -= count
        return list(plan.values())

    def _admit(self) -> None:
        """Lets waiting sequences run, first come first served, while their blocks fit."""
        promised = sum(max(len(s.tokens) - s.held.reserved, 0) for s in self.running)
        while self.waiting and len(self.running) < self._limits.max_running:
            sequence = self.waiting[0]
            scope, read, write = sequence.request.scope, sequence.request.read_cache, sequence.request.write_cache
            # A block for each running sequence to go on with besides, or they would take this one's at once.
            reserved = promised + len(self.running) * self._cache.block_size
            if not self._cache.can_admit(scope, sequence.tokens, len(sequence.tokens) + reserved, read=read):
                if not self.running:  # it ran before, and has grown past what the pool can ever hold
                    self.starved.append(self.waiting.popleft())
                    continue
                return
            self.waiting.popleft()
            sequence.blocks = self._cache.open(scope, sequence.tokens, read=read, write=write)
            sequence.computed = sequence.blocks.cached_tokens
            promised += len(sequence.tokens) - sequence.blocks.reserved
            self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens it runs now: all that remain, or as many as fit and end on a block boundary."""
        if sequence.blocks is None:  # preempted while this step was planned
            return 0
        if sequence.remaining <= budget:
            return sequence.remaining
        end = sequence.computed + budget
        aligned = end - end % self._cache.block_size
        return max(aligned - sequence.computed, 0)

    def _reserve(self, sequence: Sequence, count: int, plan: dict[int, Work]) -> bool:
        """Gets blocks for the tokens, from the youngest running sequences where there are none left."""
        while True:
            try:
                sequence.held.reserve(sequence.computed + count)
            except OutOfBlocks:
                youngest = self.running[-1]
                if youngest is sequence and len(self.running) == 1:
                    self.running.pop()
                    self.starved.append(sequence)
                    return False
                plan.pop(id(youngest), None)
                self._preempt(youngest)
                if youngest is sequence:
                    return False
            else:
                return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks. What it computed stays in the tree for as long as there is room."""
        self.preemptions += 1
        self.running.remove(sequence)
        sequence.held.finish(sequence.tokens, sequence.computed)
        sequence.blocks = None
        sequence.computed = 0
        self.waiting.appendleft(sequence)
