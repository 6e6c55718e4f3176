"""What a run sends: a workload's shape, and how many users send how much of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class Workload(StrEnum):
    """Who the users are, and so which part of their prompts others have sent before."""

    SERVICE = "service"
    """Customer service: one system text for all, conversations that grow with each round."""
    QUESTIONS = "questions"
    """The same without history: each round is the system text and a new question."""
    CODE = "code"
    """A code assistant: a long fixed list of functions in the system text, conversations that grow."""
    RAG = "rag"
    """Answers from documents: a fixed system text, and new documents with every question."""
    UNIQUE = "unique"
    """The worst case: nothing in a prompt was ever sent before."""


class Caches(StrEnum):
    """Whether a request may look in the server's caches and add to them."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Load:
    """All that decides what is sent, but for the seed."""

    workload: Workload
    users: int
    """Conversations altogether."""
    rounds: int
    """Requests of each user, one after the other."""
    concurrency: int
    """Users at a time, no more than there are; the next one begins when one has had all answers."""
    words: int
    """Of the system text; for code, of the descriptions in it."""
    question: int
    """Words of what a user sends each round; for rag, documents and question together."""
    max_tokens: int
    """Longest answer, in tokens."""
    ignore_eos: bool = False
    """Answers have that length, whatever the model would say: no answer ends early."""

    @property
    def requests(self) -> int:
        """How many the run sends, warm-up not counted."""
        return self.users * self.rounds


# 450 words are about 500 tokens, 86 about 100 with the marks that a chat template puts around each round: customer
# service as operators describe it. A list of functions of 670 words is about 2,000 tokens of JSON.
_SHAPES: Final[Mapping[Workload, Load]] = {
    load.workload: load
    for load in (
        Load(Workload.SERVICE, users=8, rounds=10, concurrency=8, words=450, question=86, max_tokens=32),
        Load(Workload.QUESTIONS, users=8, rounds=10, concurrency=8, words=450, question=86, max_tokens=32),
        Load(Workload.CODE, users=8, rounds=4, concurrency=8, words=670, question=60, max_tokens=32),
        Load(Workload.RAG, users=8, rounds=4, concurrency=8, words=450, question=450, max_tokens=32),
        Load(Workload.UNIQUE, users=8, rounds=4, concurrency=8, words=450, question=86, max_tokens=32),
    )
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller wants otherwise than a workload's own shape has it; None leaves that."""

    users: int | None = None
    rounds: int | None = None
    concurrency: int | None = None
    words: int | None = None
    question: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False

    def of(self, workload: Workload) -> Load:
        """The workload's load with these wishes."""
        shape = _SHAPES[workload]
        users = self.users or shape.users
        return replace(
            shape,
            users=users,
            rounds=self.rounds or shape.rounds,
            concurrency=min(users, self.concurrency or shape.concurrency),
            words=self.words or shape.words,
            question=self.question or shape.question,
            max_tokens=self.max_tokens or shape.max_tokens,
            ignore_eos=self.ignore_eos,
        )
