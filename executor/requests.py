"""A request as the engine knows it: what was asked, how far it has come, and what it tells whoever waits for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from executor.events import Deliver, Finished, FinishReason, Usage
from executor.kv.node import NOTHING, Match

if TYPE_CHECKING:
    from executor.kv.node import Node, Scope
    from executor.kv.private import PrivateRoots
    from executor.kv.sequence import SequenceBlocks
    from executor.sampler import TokenHistory, TokenRules


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; the contract's SamplingParams with every default filled in."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    """When not empty, only these token ids can be chosen."""
    samples: int = 1
    """Independent answers to the one prompt; the contract's n."""
    logprobs: int | None = None
    """Log-probabilities to tell: None for none, else how many of the likeliest besides the chosen token's."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends, as far as tokens tell."""

    stop_token_ids: frozenset[int] = frozenset()
    """The caller's own and, unless they are to be ignored, the model's end-of-sequence tokens."""
    max_tokens: int | None = None
    """None is no limit but the context's. 0 computes the prompt and generates nothing."""
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    scope: Scope
    read_cache: bool = True
    write_cache: bool = True
    request_id: str = ""

    @property
    def generates(self) -> bool:
        """Whether it wants an answer, and not only its prompt computed."""
        return self.stopping.max_tokens != 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs a prompt: its last token gives the first logits")
        if self.sampling.samples > 1 and not self.generates:
            raise ValueError("a request that generates nothing has no samples that could differ")


_arrivals: Final = itertools.count()
_MOST_OWNERS: Final = 4
_SEED_STEP: Final = 0xD1342543DE82EF95  # odd and without pattern, so that seeds of samples and of requests do not meet


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: what its samples have in common. Written by the engine's thread alone."""

    request: Request
    deliver: Deliver
    samples: list[Sequence] = field(default_factory=list)
    """The first one from the start, to compute the prompt for all; the others when that is done."""
    stopped: set[int] = field(default_factory=set)
    """Samples that were stopped; those that had not begun then end as soon as they do."""
    own: PrivateRoots | None = None
    """Where its samples share what they publish, if nobody else may find that."""
    rules: TokenRules | None = None
    """Its biases and limits on tokens, as tensors."""
    unfinished: int = field(init=False)
    """Samples that have not ended yet, those to come among them."""
    cached_tokens: int | None = None
    """Prompt tokens that came from the tree, counted once, at the first admission."""
    owner: Job | None = None
    """Whose prefix it waited for last."""
    owners: int = 0
    """How many it has waited for."""
    arrival: int = field(default_factory=lambda: next(_arrivals))
    submitted: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.unfinished = self.request.sampling.samples
        self.samples.append(Sequence(self, 0))

    @property
    def complete(self) -> bool:
        """Whether all its samples have begun."""
        return len(self.samples) == self.request.sampling.samples

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        generated = sum(sample.generated for sample in self.samples)
        return Usage(len(self.request.prompt), generated, self.cached_tokens or 0)

    def nodes(self) -> Iterator[Node]:
        """The nodes of the tree that its samples read; one that several read comes as often."""
        for sample in self.samples:
            if sample.blocks is not None:
                yield from sample.blocks.path

    def waits_for(self, owner: Job) -> bool:
        """Whether it waits for a prefix that another request is computing: not for ever new ones who then go away."""
        if owner is not self.owner:
            if self.owners == _MOST_OWNERS:
                return False
            self.owner = owner
            self.owners += 1
        return True

    def begin_others(self) -> list[Sequence]:
        """The samples besides the first, new. They know what that one has computed."""
        first = self.samples[0]
        known = max(first.known, first.computed)
        others = [Sequence(self, index, known=known) for index in range(1, self.request.sampling.samples)]
        self.samples += others
        return others


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample in the making. Written by the engine's thread alone."""

    job: Job
    index: int
    tokens: list[int] = field(init=False)
    """The prompt and what was generated after it."""
    computed: int = 0
    """How many of the tokens have their keys and values in the pool, shared ones included."""
    known: int = 0
    """How many of its first tokens its own request had computed when it began to wait."""
    found: Match = NOTHING
    """What the tree had of its tokens at the last look, while it waits."""
    blocks: SequenceBlocks | None = None
    """Held from admission on; waiting sequences hold none."""
    history: TokenHistory | None = None
    ended: bool = False
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.job.request.prompt)

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.job.request

    @property
    def seed(self) -> int:
        """The sample's own: the first one's is the request's."""
        return (self.request.sampling.seed + self.index * _SEED_STEP) % 2**64

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that still have to run before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def held(self) -> SequenceBlocks:
        """The blocks of a sequence that runs."""
        if self.blocks is None:
            raise RuntimeError("a sequence that does not run holds no blocks")
        return self.blocks

    @property
    def readable(self) -> int:
        """How many of its first tokens it may look up among what all requests share."""
        if self.request.read_cache:
            return len(self.tokens)
        return 0 if self.job.own else self.known  # what its own request put there it finds again

    @property
    def ran(self) -> bool:
        """Whether it was admitted before; one that waits was preempted then."""
        return self.admitted > 0

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by arrival, and the samples of one request by their index."""
        return self.job.arrival, self.index

    def enter(self, blocks: SequenceBlocks, computed: int) -> None:
        """Runs from now on, with so many tokens computed already."""
        self.blocks = blocks
        self.computed = computed
        self.found = NOTHING
        self.admitted = self.admitted or time.monotonic()

    def leave(self) -> None:
        """Gives its blocks back. What it computed stays in the tree for as long as there is room."""
        self.held.finish(self.tokens, self.computed)
        self.blocks = None
        self.known = max(self.known, self.computed)
        self.computed = 0

    def since_last_token(self) -> float:
        """Seconds since the last token, or since the arrival where none has come yet."""
        return time.monotonic() - (self.last_token or self.job.submitted)

    def extend(self, token: int) -> None:
        """Adds a chosen token, which has not run yet."""
        self.tokens.append(token)
        self.last_token = time.monotonic()
        self.first_token = self.first_token or self.last_token
        if self.history is not None:
            self.history.add(token)

    def finished(self, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        """The closing event, with the clock read now."""
        now = time.monotonic()
        admitted, first = self.admitted or now, self.first_token or now
        return Finished(
            index=self.index,
            reason=reason,
            stop_token_id=stop_token_id,
            usage=None if self.job.unfinished else self.job.usage,
            queue_seconds=admitted - self.job.submitted,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )
