"""Who runs in the next step, and on which tokens: continuous batching with chunked prefill.

Every running sequence that decodes gets its token; what is left of the step's token budget goes to prefill chunks, in
order of arrival, ending on block boundaries. Beside answers it is only so much that they do not stall: less, the fewer
prompts there are to be computed for each of them.

Waiting sequences hold no blocks. One is admitted when what it needs fits beside what the running ones have been
promised. When a running sequence can get no block all the same, the youngest gives way: it publishes what it has
computed, waits at the head of the queue, and picks its blocks up from the tree.

A waiting sequence is matched anew each step, and left to wait while the next block that it needs is one that a running
prefill is about to publish. Nothing is registered for that: when the owner is done, fails or goes away, the next look
says so by itself.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from executor.batch import Work
from executor.kv.cache import KVCache
from executor.kv.node import Match
from executor.kv.pool import OutOfBlocks
from executor.requests import Job, Sequence

_LOOKAHEAD: Final = 64  # waiting sequences that a step looks at; each costs a match
_WORTH_WAITING_TOKENS: Final = 16  # for less, a step's delay costs more than it saves
MAX_OVERTAKEN: Final = 16
"""How many that arrived later may be admitted before a request, because the tree holds more of their prompts."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a step and of the queue."""

    max_batch_tokens: int
    """Tokens that a step runs at most; each decoding sequence takes one of them."""
    max_running: int
    max_waiting: int
    max_stall: float = math.inf
    """How many times as long as without them a step may take for the prompts in it, while as many answers run as
    prompts are to be computed; where more prompts are, in proportion."""
    step_tokens: float = math.inf
    """How many tokens' time a step takes before its first token."""

    def prompt_tokens(self, answers: int, prompts: int) -> float:
        """How many tokens of prompts a step may run beside so many answers."""
        if not answers:
            return math.inf
        return (self.max_stall - 1.0) * (self.step_tokens + answers) * max(1.0, prompts / answers)


class Scheduler:
    """Owns which sequences wait and which run; the engine's thread alone calls it."""

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        if limits.max_running > limits.max_batch_tokens:
            raise ValueError("every running sequence must find room for its token in a step")
        self.waiting: list[Sequence] = []
        """In order of arrival, but first those that ran before."""
        self.running: list[Sequence] = []
        """In order of arrival: the last one is the first to give way."""
        self.starved: list[Sequence] = []
        """Sequences of the last `schedule` that have all the pool to themselves and found no block: they end there."""
        self.shut_out: list[Sequence] = []
        """Sequences of the last `schedule` that cannot even begin, because pins hold the blocks that they need."""
        self.preemptions = 0
        self.waited_requests = 0
        """Requests that waited for a prefix which another was computing."""
        self._cache = cache
        self._limits = limits
        self._short = False
        """Whether the last `schedule` had a place for the next one, but not the blocks."""

    def set_pace(self, step_tokens: float) -> None:
        """Steps take another time from now on: what limits.step_tokens says."""
        self._limits = replace(self._limits, step_tokens=step_tokens)

    @property
    def running_requests(self) -> int:
        """Requests of which a sample runs."""
        return len(_jobs(self.running))

    @property
    def waiting_requests(self) -> int:
        """Requests of which no sample runs."""
        return len(_jobs(self.waiting) - _jobs(self.running))

    @property
    def full(self) -> bool:
        """Whether the queue has no room for another request."""
        places = 0 if self._short else max(self._limits.max_running - len(self.running), 0)
        return self.waiting_requests >= self._limits.max_waiting + places

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence by its arrival; one that ran before goes ahead of those that did not."""
        insort(self.waiting, sequence, key=_queue_order)

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Lets a sample run from where another one is; queues it where it can get no place or no block."""
        if len(self.running) < self._limits.max_running:
            try:
                blocks = source.held.fork(source.tokens, source.computed)
            except OutOfBlocks:
                pass
            else:
                sequence.enter(blocks, source.computed)
                insort(self.running, sequence, key=_order)
                return
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks stay for the caller to release."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Work]:
        """Plans a step: admits, gives blocks to all tokens that are to run, preempts where there are none."""
        self.starved, self.shut_out = [], []
        self._admit()
        plan: dict[int, Work] = {}
        budget = self._limits.max_batch_tokens
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        beside = self._limits.prompt_tokens(len(decoding), len(prefilling) + len(self.waiting))
        if beside < budget:  # a block at least, or a long prompt would never end
            size = self._cache.block_size
            budget = min(budget, len(decoding) + max(round(beside / size), 1) * size)
        for sequence in decoding + prefilling:
            count = self._chunk(sequence, budget)
            if count and self._reserve(sequence, count, plan):
                plan[id(sequence)] = Work(sequence, sequence.computed, count)
                budget -= count
        return list(plan.values())

    def _admit(self) -> None:
        """Lets waiting sequences run, each in its turn, while there is room for the next one."""
        self._short = False
        for sequence in self._in_turn():
            if len(self.running) >= self._limits.max_running:
                return
            found = self._look(sequence)  # anew: who was admitted before it may have taken the place of what it found
            if self._waits_for_owner(sequence, found):
                continue
            if self._has_room(sequence, found):
                self._enter(sequence, found)
            elif self.running:
                self._short = True
                return
            else:
                self._give_up(sequence)

    def _in_turn(self) -> list[Sequence]:
        """The waiting sequences that have been here longest, in the order of their turns."""
        if len(self.running) >= self._limits.max_running:
            return []
        turns = {sequence: self._turn(sequence) for sequence in self.waiting[:_LOOKAHEAD]}
        return sorted(turns, key=turns.__getitem__)

    def _turn(self, sequence: Sequence) -> tuple[bool, float, int]:
        """Its place in the order of arrival, put back by what it would have to compute; first of all if it ran before.

        Requests have arrival numbers of their own, so those that the tree helps alike keep their order.
        """
        arrival, index = sequence.order
        if sequence.ran:
            return False, arrival, index
        computed = 1.0 - self._look(sequence).length / len(sequence.tokens)
        return True, arrival + MAX_OVERTAKEN * computed, index

    def _look(self, sequence: Sequence) -> Match:
        """What the tree has of its tokens now, but for the last one, and what its own request keeps to itself."""
        scope, own, limit = sequence.request.scope, sequence.job.own, len(sequence.tokens) - 1
        sequence.found = self._cache.find(scope, sequence.tokens, min(sequence.readable, limit), sequence.found)
        return own.extend(sequence.found, sequence.tokens, limit) if own else sequence.found

    def _waits_for_owner(self, sequence: Sequence, found: Match) -> bool:
        """Whether somebody is about to publish what it needs next, so that it need not compute that too."""
        job, owner = sequence.job, self._owner_of_next(sequence, found.length)
        if owner is None:
            return False
        if owner.job is job:
            return True
        new = not job.owners
        waits = job.waits_for(owner.job)
        self.waited_requests += new and waits
        return waits

    def _owner_of_next(self, sequence: Sequence, cached: int) -> Sequence | None:
        """The running prefill that is about to publish the block at which the tree's part of this prompt ends.

        And with it, now or later, enough that comes behind that.
        """
        size, tokens = self._cache.block_size, sequence.tokens
        start, enough = cached - cached % size, cached + _WORTH_WAITING_TOKENS
        if enough >= len(tokens):
            return None
        for owner in self.running:
            publishes = owner.remaining > 1 and owner.computed < start + size <= len(owner.tokens)
            if publishes and _shares(owner, sequence) and _agree(owner.tokens, tokens, start, enough):
                return owner
        return None

    def _has_room(self, sequence: Sequence, found: Match) -> bool:
        """Whether its tokens fit beside what the running sequences have been promised and not taken yet.

        With a block for each of those to go on with besides, or they would take this one's at once.
        """
        promised = sum(max(len(s.tokens) - s.held.reserved, 0) for s in self.running)
        further = len(self.running) * self._cache.block_size
        return self._cache.can_admit(found, len(sequence.tokens) + promised + further)

    def _enter(self, sequence: Sequence, found: Match) -> None:
        blocks = self._cache.open(sequence.request.scope, found, sequence.job.own)
        sequence.enter(blocks, blocks.cached_tokens)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)

    def _give_up(self, sequence: Sequence) -> None:
        """It has the pool to itself, and cannot go on."""
        # One that has an answer has grown past what is there; any other fitted, but for what is pinned.
        (self.starved if sequence.generated else self.shut_out).append(sequence)
        self.remove(sequence)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens it runs now: all that remain, else as many as fit, up to a block boundary if one is there."""
        if sequence.blocks is None:  # preempted while this step was planned
            return 0
        if sequence.remaining <= budget:
            return sequence.remaining
        beyond = (sequence.computed + budget) % self._cache.block_size
        return budget - beyond if beyond < budget else budget

    def _reserve(self, sequence: Sequence, count: int, plan: dict[int, Work]) -> bool:
        """Gets blocks for the tokens, from the youngest running sequences where there are none left."""
        while True:
            try:
                sequence.held.reserve(sequence.computed + count)
            except OutOfBlocks:
                youngest = self.running[-1]
                if youngest is sequence and len(self.running) == 1:
                    self._give_up(sequence)
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
        sequence.leave()
        self.add(sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _queue_order(sequence: Sequence) -> tuple[bool, int, int]:
    return not sequence.ran, *sequence.order


def _jobs(sequences: Iterable[Sequence]) -> set[Job]:
    return {sequence.job for sequence in sequences}


def _shares(owner: Sequence, sequence: Sequence) -> bool:
    """Whether a sequence will find what another one publishes."""
    if owner.job is sequence.job:
        return True
    return sequence.request.read_cache and owner.held.findable and owner.request.scope == sequence.request.scope


def _agree(left: list[int], right: list[int], start: int, end: int) -> bool:
    """Whether the first `end` tokens are the same; those from `start` on are the likeliest to differ."""
    return left[start:end] == right[start:end] and left[:start] == right[:start]
