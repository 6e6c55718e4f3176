"""Known beginnings: a conversation grows at its end, so most of its text was tokenized a turn ago.

Of each prompt two beginnings are worth keeping: up to the end of the system part, which other conversations share, and
up to the last closed message, with which the next turn begins. Each ends right after a control token where a cut
changes no ids (cuts.py), and is kept under the digest of its text.
"""

import logging
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from assembler import cuts
from assembler.cache.key import Keys, frame
from assembler.control import Live, Reading
from assembler.messages import Conversation, Message, Role
from assembler.spots import stretches
from assembler.templates import ChatTemplate, RenderOptions
from assembler.tokenizer import TokenIds, Tokenizer
from shared.errors import HermesError

# A shorter system part is tokenized as quickly as it is found.
_LEAST_SYSTEM_CHARACTERS: Final = 256
# Openings of answers that are remembered; one for each set of template variables in use.
_MOST_OPENINGS: Final = 256

_log: Final = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """A text up to `end`, and the key of its ids."""

    end: int
    key: bytes


class Known(NamedTuple):
    """A beginning that was found, with its ids; nothing at all where `end` is 0."""

    end: int
    ids: TokenIds


class Plan(NamedTuple):
    """candidates: beginnings of a text that may be known, the longest first.
    worth: those of them that are worth keeping, the shortest first.
    """

    candidates: tuple[Beginning, ...] = ()
    worth: tuple[Beginning, ...] = ()


class Encoded(NamedTuple):
    """A text's ids. made: the beginnings worth keeping that were not known, by key."""

    ids: TokenIds
    made: tuple[tuple[bytes, TokenIds], ...]


NOTHING: Final = Known(0, array("I"))


class Beginnings:
    """Finds the beginnings of prompts, and encodes what comes after them. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, keys: Keys) -> None:
        """Tries where texts may be cut; takes a fraction of a second."""
        self._tokenizer = tokenizer
        self._keys = keys
        found = cuts.tried(tokenizer.added.cuts, tokenizer)
        if found.problem is not None:
            _log.info("beginnings of prompts are not cached for this tokenizer, because %s", found.problem)
        self._pattern = re.compile("|".join(map(re.escape, sorted(found.tokens)))) if found.tokens else None
        self._reach = max(map(len, found.tokens), default=0)

    def plan(self, reading: Reading, conversation: Conversation, opening: str, namespace: str) -> Plan:
        """What may be known of a rendered text. opening: what the template wrote to open the answer."""
        places = list(self._places(reading))
        if not places:
            return Plan()
        text = reading.text
        closed = _last(places, len(text) - len(opening) if text.endswith(opening) else len(text))
        system = _last(places, _system_end(text, conversation.messages))
        ends = {end for end, token in places if token == closed[1] and end <= closed[0]}
        worth = {closed[0]}
        if _LEAST_SYSTEM_CHARACTERS <= system[0] < closed[0]:
            worth.add(system[0])
        found = {each.end: each for each in self._digested(reading, sorted(ends | worth), namespace)}
        return Plan(
            tuple(found[end] for end in sorted(found, reverse=True)), tuple(found[end] for end in sorted(worth) if end)
        )

    def encode(self, reading: Reading, plan: Plan, known: Known) -> Encoded:
        """The text's ids, of which a beginning is known."""
        ids, place = known.ids[:], known.end
        made = []
        for beginning in plan.worth:
            if beginning.end > place:
                ids.extend(self._piece(reading, place, beginning.end))
                place = beginning.end
                made.append((beginning.key, ids[:]))
        ids.extend(self._piece(reading, place, len(reading.text)))
        return Encoded(ids, tuple(made))

    def _places(self, reading: Reading) -> Iterator[tuple[int, str]]:
        """Where the text may be cut, in order, and after which token."""
        if self._pattern is None:
            return
        starts = None if reading.live is None else {live.start for live in reading.live}
        for match in stretches(self._pattern, reading.text, self._reach):
            if starts is None or match.start() in starts:
                yield match.end(), match[0]

    def _digested(self, reading: Reading, ends: Iterable[int], namespace: str) -> Iterator[Beginning]:
        """The beginnings up to each end, in order; ends of 0 are left out."""
        digest = self._keys.begin(namespace.encode(), b"plain" if reading.live is None else b"guarded")
        place = 0
        for end in ends:
            if end:
                _add(digest, reading, place, end)
                place = end
                yield Beginning(end, digest.copy().digest())

    def _piece(self, reading: Reading, start: int, end: int) -> TokenIds:
        text = reading.text[start:end]
        if reading.live is None:
            return self._tokenizer.encode(text)
        live = [
            Live(each.start - start, each.end - start, each.token)
            for each in reading.live
            if start <= each.start and each.end <= end
        ]
        return self._tokenizer.encode_guarded(text, live)


class Openings:
    """What a template writes to open an answer, with each set of template variables."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, options: RenderOptions, kwargs_json: str) -> str:
        """kwargs_json: the options' variables as the caller wrote them."""
        if not options.add_generation_prompt:
            return ""
        if kwargs_json not in self._known:
            self._known[kwargs_json] = self._tried(options)
            if len(self._known) > _MOST_OPENINGS:
                self._known.popitem(last=False)
        return self._known.get(kwargs_json, "")

    def _tried(self, options: RenderOptions) -> str:
        probe = Conversation((Message(Role.USER, "q"),))
        try:
            opened = self._template.render(probe, options)
            closed = self._template.render(probe, replace(options, add_generation_prompt=False))
        except HermesError:  # it takes no such conversation; where an answer opens is then not known
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""


def _add(digest: Any, reading: Reading, start: int, end: int) -> None:
    """Adds a stretch of the text. Where only some control tokens count, each of those is framed, and what is before it.

    So a text in which a token counts never has the key of one in which the same letters are a caller's.
    """
    text, live = reading.text, reading.live
    if live is None:
        digest.update(text[start:end].encode())
        return
    place = start
    for each in live[bisect_left(live, start, key=_start) : bisect_right(live, end, key=_end)]:
        frame(digest, text[place : each.start].encode())
        frame(digest, each.token.encode())
        place = each.end


def _start(live: Live) -> int:
    return live.start


def _end(live: Live) -> int:
    return live.end


def _last(places: Sequence[tuple[int, str]], end: int) -> tuple[int, str]:
    """The last place that is not behind `end`; 0 where there is none."""
    at = bisect_right(places, end, key=lambda place: place[0])
    return places[at - 1] if at else (0, "")


def _system_end(text: str, messages: tuple[Message, ...]) -> int:
    """Where the first message that is not the system's begins, as far as its words tell; 0 where that is not known."""
    place = 0
    for message in messages:
        words = message.content.strip()
        place = text.find(words, place)
        if place < 0:
            return 0
        if message.role is not Role.SYSTEM:
            return place
        place += len(words)
    return 0
