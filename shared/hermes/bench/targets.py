"""The seam between a load and the servers that it can go to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hermes.bench.loads import Caches
from hermes.messages import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One request; answers are greedy."""

    messages: Sequence[Message]
    max_tokens: int
    ignore_eos: bool
    caches: Caches


class Reply(NamedTuple):
    """An answer that came whole, with what the server counted."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    assembly_cached_tokens: int | None = None
    engine_seconds: float | None = None
    """From when the engine had the request to its first token; None where the server does not tell."""


class TargetError(Exception):
    """A request that was not answered.

    reason: stable name.
    message: for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class Target(Protocol):
    """A chat server under load. Belongs to the event loop that it is made in."""

    @property
    def name(self) -> str:
        """As the caller wrote it: `hermes:…` or `openai:…`."""

    async def begin(self) -> None:
        """Called before each run: from here on nothing cached by an earlier run is found, where that can be had."""

    async def answer(self, call: Call, heard: Callable[[], None]) -> Reply:
        """Sends one request and reads its whole answer.

        heard: is called for each piece of text, when it comes.

        Raises TargetError.
        """

    async def end(self) -> None:
        """Called after each run: the server forgets what it cached, where it can be told to. Raises TargetError."""

    async def facts(self) -> Mapping[str, str | int]:
        """What it serves, as it says itself. Raises TargetError."""

    async def close(self) -> None:
        """Ends its connections."""
