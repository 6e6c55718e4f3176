"""Truncation by rounds: what of a conversation goes where its prompt is longer than the window.

A round is one or more user messages and all that follows until the next user message. Callers send their whole
conversation with every turn, so a cut just big enough would move with each of them, and with it the beginning that
prompts have in common. The cut is made in strides of a quarter window: it stays where it is until the conversation
has grown by so much. That needs no state; the same conversation is always cut at the same place.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from assembler import order
from assembler.messages import Conversation, Message, Role
from shared.errors import HermesError, invalid_argument

_STRIDES_PER_WINDOW: Final = 4
# The marks around a message, in characters; only for guesses of how long a prompt will be.
_MARK_CHARACTERS: Final = 30
# Guesses by length come close in two or three; halving after these bounds what odd tokenizers cost.
_GUESSES: Final = 4


class Prompt(Protocol):
    """What an attempt gives: a conversation rendered and encoded."""

    @property
    def tokens(self) -> int: ...


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True, slots=True)
class Window:
    """tokens: the prompt may have so many, at least 1. keep_last_rounds: these stay; the last one always does."""

    tokens: int
    keep_last_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Truncated(Generic[P]):
    """A prompt that fits. dropped: the places of the messages left out, which are whole rounds in a row."""

    prompt: P
    dropped_rounds: int
    dropped: range


class _Rounds(NamedTuple):
    """head: so many system messages come first, and stay. starts: where each round begins."""

    head: int
    starts: Sequence[int]


def truncated(
    conversation: Conversation, whole: P, window: Window, attempt: Callable[[Conversation], P]
) -> Truncated[P]:
    """The conversation's prompt without its oldest rounds, if it has more tokens than the window.

    Of T tokens, ceil((T - W) / (W/4)) * (W/4) are to go: the fewest of the oldest rounds that have so many are left
    out, or all that may be. The system messages at the beginning and the last rounds stay, and so does everything that
    is no message: tools, template variables, the opened answer. A round begins only at a user message, and never
    between a tool's call and its result, so no answer and no result loses its question.

    whole: the prompt of the conversation as it is, assembled without a limit on its length, because how much is too
    much has to be known exactly. attempt: renders and encodes a shorter conversation in the same way; it is asked three
    times or so, however many rounds there are, and at most about log2 of them. What is odd about the caller's messages
    is what was found for the whole: in an attempt their places differ.

    Raises HermesError: what attempt raises; PROMPT_TOO_LONG where what has to stay is longer than the window.
    """
    if whole.tokens <= window.tokens:
        return Truncated(whole, 0, range(0))
    rounds = _rounds(conversation.messages)
    most = len(rounds.starts) - max(1, window.keep_last_rounds)
    if most < 1:
        raise _too_long(whole, whole, window, len(rounds.starts))
    search = _Search(conversation, rounds, whole, attempt)
    dropped = search.fewest(most, whole.tokens - _tokens_to_drop(whole.tokens, window.tokens))
    prompt = search.prompt(dropped)
    if prompt.tokens > window.tokens:
        raise _too_long(prompt, whole, window, len(rounds.starts) - dropped)
    return Truncated(prompt, dropped, range(rounds.head, rounds.starts[dropped]))


def without(conversation: Conversation, rounds: int) -> Conversation:
    """The conversation without so many of its oldest rounds, of which it has more."""
    return _without(conversation, _rounds(conversation.messages), rounds)


def _tokens_to_drop(tokens: int, window: int) -> int:
    """In whole strides, and at least what the prompt has too many of."""
    strides = -(-_STRIDES_PER_WINDOW * (tokens - window) // window)
    return -(-strides * window // _STRIDES_PER_WINDOW)


def _rounds(messages: tuple[Message, ...]) -> _Rounds:
    head = next((place for place, each in enumerate(messages) if each.role is not Role.SYSTEM), len(messages))
    last_result = {asked: place for place, asked in order.results(messages) if asked is not None}
    starts = [head] if head < len(messages) else []
    asked = answered = False  # in the round so far; what comes before the first question belongs to its round
    open_until = -1  # the last place of a result whose call has been made
    for place, message in enumerate(messages):
        if message.role is Role.USER:
            if asked and answered and open_until < place:
                starts.append(place)
                answered = False
            asked = True
        elif message.role is not Role.SYSTEM:
            answered = asked
        open_until = max(open_until, last_result.get(place, -1))
    return _Rounds(head, starts)


def _without(conversation: Conversation, rounds: _Rounds, dropped: int) -> Conversation:
    messages = conversation.messages
    return replace(conversation, messages=(*messages[: rounds.head], *messages[rounds.starts[dropped] :]))


class _Search(Generic[P]):
    """Looks for a cut, keeping what was tried."""

    def __init__(
        self, conversation: Conversation, rounds: _Rounds, whole: P, attempt: Callable[[Conversation], P]
    ) -> None:
        self._conversation = conversation
        self._rounds = rounds
        self._attempt = attempt
        self._tried: dict[int, P] = {0: whole}
        lengths = (each.characters + _MARK_CHARACTERS for each in conversation.messages)
        before = [0, *accumulate(lengths)]
        self._tokens_per_character = whole.tokens / (before[-1] + sum(tool.characters for tool in conversation.tools))
        # How many characters go with each number of rounds; it only grows.
        self._characters = [before[start] - before[rounds.head] for start in rounds.starts]

    def prompt(self, dropped: int) -> P:
        """The prompt without so many rounds."""
        if dropped not in self._tried:
            self._tried[dropped] = self._attempt(_without(self._conversation, self._rounds, dropped))
        return self._tried[dropped]

    def fewest(self, most: int, tokens: int) -> int:
        """The fewest rounds without which the prompt has no more tokens; `most` where it always has."""
        short, enough = 0, most
        guesses = 0
        while enough - short > 1:
            between = self._guess(short, enough, tokens) if guesses < _GUESSES else (short + enough) // 2
            guesses += 1
            if self.prompt(between).tokens <= tokens:
                enough = between
            else:
                short = between
        return enough

    def _guess(self, short: int, enough: int, tokens: int) -> int:
        """A number between the two, as if tokens went with characters."""
        per_character = self._tokens_per_character
        if enough in self._tried:
            span = self._characters[enough] - self._characters[short]
            per_character = (self._tried[short].tokens - self._tried[enough].tokens) / span
        wanted = self._characters[short] + (self._tried[short].tokens - tokens) / per_character
        return min(max(bisect_left(self._characters, wanted), short + 1), enough - 1)


def _too_long(prompt: Prompt, whole: Prompt, window: Window, kept_rounds: int) -> HermesError:
    if prompt is whole:
        problem = "none of its rounds may be left out"
    else:
        rounds = "round" if kept_rounds == 1 else f"{kept_rounds} rounds"
        problem = f"{prompt.tokens} with nothing but the system messages, the tools and the last {rounds}"
    return invalid_argument(
        "PROMPT_TOO_LONG",
        f"The prompt has {whole.tokens} tokens, and {problem}, but no more than {window.tokens} are allowed: shorten "
        "what has to stay, or keep fewer rounds.",
        prompt_tokens=str(prompt.tokens),
        max_prompt_tokens=str(window.tokens),
        whole_prompt_tokens=str(whole.tokens),
        kept_rounds=str(kept_rounds),
    )
