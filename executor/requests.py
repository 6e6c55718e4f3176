"""A request as the engine knows it: what was asked, how far it has come, and what it tells whoever waits for it."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shared.errors import HermesError

if TYPE_CHECKING:
    from executor.kv.node import Scope
    from executor.kv.sequence import SequenceBlocks
    from executor.sampler import TokenHistory


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


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends, as far as tokens tell."""

    stop_token_ids: frozenset[int] = frozenset()
    """The caller's own and, unless they are to be ignored, the model's end-of-sequence tokens."""
    max_tokens: int | None = None
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


class FinishReason(enum.Enum):
    """Why an answer ended; one that failed ends with an error instead."""

    STOP = enum.auto()
    LENGTH = enum.auto()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was admitted and matched."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Generated:
    """A token was chosen."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer ended, and its blocks are released. Durations are in seconds."""

    reason: FinishReason
    stop_token_id: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error."""

    error: HermesError


Event = Started | Generated | Finished | Failed
Deliver = Callable[[Event], None]
"""Takes a request's events, on the engine's thread and in order."""

_arrivals: Final = itertools.count()


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. Written by the engine's thread alone."""

    request: Request
    deliver: Deliver
    tokens: list[int] = field(init=False)
    """The prompt and what was generated after it."""
    computed: int = 0
    """How many of the tokens have their keys and values in the pool, shared ones included."""
    blocks: SequenceBlocks | None = None
    """Held from admission on; waiting sequences hold none."""
    cached_tokens: int | None = None
    """Prompt tokens that came from the tree, counted once, at the first admission."""
    history: TokenHistory | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))
    submitted: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt)

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

    def admit(self) -> Started:
        """Notes the first admission: what came from the tree, and when."""
        self.cached_tokens = self.held.cached_tokens
        self.admitted = time.monotonic()
        return Started(self.prompt_tokens, self.cached_tokens)

    def since_last_token(self) -> float:
        """Seconds since the last token, or since the arrival where none has come yet."""
        return time.monotonic() - (self.last_token or self.submitted)

    def extend(self, token: int) -> Generated:
        """Adds a chosen token, which has not run yet."""
        self.tokens.append(token)
        self.last_token = time.monotonic()
        self.first_token = self.first_token or self.last_token
        if self.history is not None:
            self.history.add(token)
        return Generated(token)

    def finished(self, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        """The closing event, with the clock read now."""
        now = time.monotonic()
        admitted, first = self.admitted or now, self.first_token or now
        return Finished(
            reason=reason,
            stop_token_id=stop_token_id,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=self.cached_tokens or 0,
            queue_seconds=admitted - self.submitted,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )
