"""What a request is told on its way: admitted, a token chosen, a sample finished, or failed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import HermesError


class FinishReason(enum.Enum):
    """Why an answer ended; one that failed ends with an error instead."""

    STOP = enum.auto()
    LENGTH = enum.auto()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was admitted and matched."""

    prompt_tokens: int
    cached_tokens: int


class TokenLogprob(NamedTuple):
    """How likely the model itself held a token, before penalties and temperature."""

    token_id: int
    logprob: float


class Choice(NamedTuple):
    """A chosen token, with its log-probability and the likeliest tokens at its place where those were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """A token of one sample was chosen."""

    index: int
    choice: Choice


class Usage(NamedTuple):
    """Token counts of a whole request, all samples together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """One sample ended, and its blocks are released. Durations are in seconds."""

    index: int
    reason: FinishReason
    stop_token_id: int | None
    usage: Usage | None
    """On the last sample to finish."""
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
