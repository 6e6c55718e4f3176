"""Beginnings of recent prompts: up to where the first message of a user's begins, and a little of what comes then."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Final, NamedTuple

from assembler import differences, places, spans
from assembler.differences import Gap
from assembler.messages import Message, Role
from assembler.spans import Kind, Look

# Characters of a head, and of what comes after it; what is longer is taken to go on as it does there.
_KEPT: Final = 16_384
_KEPT_AFTER: Final = 8_192
# System messages of a head that is looked at; of tens of thousands each would be looked for.
_MOST_MESSAGES: Final = 256
# Heads of one namespace and template that are remembered.
_MOST_HEADS: Final = 32
# With so many of them a new head is compared, the nearest in length; at so many it has a quick look.
_MOST_TRIES: Final = 3
_MOST_LOOKS: Final = 8
# Characters at the ends of heads; those that have either end in common are compared first.
_EDGE: Final = 48
# What tells conversations apart.
_FIRST_CHARACTERS: Final = 256

# Dates, times to the second and random ids change by nature: two heads that differ in nothing else tell enough.
# Numbers, weekdays and hours are also limits, versions and opening hours that people try out, and names are also other
# people's prompts: of those it takes so many.
_TRIED_OUT: Final = frozenset({Kind.NUMBER, Kind.VERSION, Kind.HOUR, Kind.WEEKDAY})
_TRIALS: Final = 3
_TEXTS: Final = 8
# Names may begin or end alike, so that what differs between two of them begins later and ends earlier.
_SLACK: Final = 32
# Characters after a value that have to be alike where more is another text behind them; a dozen tokens.
_LEAST_ALIKE: Final = 64


class Head:
    """The beginning of a prompt. Belongs to the `Heads` that it is in."""

    __slots__ = ("family", "first", "is_shared", "length", "look", "rest", "start", "total")

    def __init__(self, start: str, rest: str, length: int, total: int, first: str) -> None:
        """start: up to the first message that is not the system's. rest: what comes after it. Both as far as kept.

        length: of all that comes before that message, in characters. total: of the prompt. first: how the message
        begins.
        """
        self.start = start
        self.rest = rest
        self.length = length
        self.total = total
        self.first = first
        self.family = object()
        """The same for heads that differ in a few places only."""
        self.is_shared = False
        """Whether several conversations have it."""
        self.look: Look | None = None
        """The one value in it that was told to change."""

    @property
    def size(self) -> int:
        """Characters that it holds."""
        return len(self.start) + len(self.rest)


class Change(NamedTuple):
    """What is another in a prompt than it was. look: a value in the head's text.

    alike: the text after it, up to the next change or the end of the head, that is the same. more: characters that are
    the same besides, after the head, or as far as can be told where it is longer than what is kept.
    """

    look: Look
    alike: str
    more: int = 0


def head_of(text: str, messages: tuple[Message, ...]) -> Head | None:
    """The head of a rendered prompt; None where it cannot be told, or has too many messages."""
    for message, place in zip(messages[: _MOST_MESSAGES + 1], places.of(text, messages), strict=False):
        if message.role is not Role.SYSTEM:
            start = text[: min(place.start, _KEPT)]
            rest = text[place.start : place.start + _KEPT_AFTER] if place.start <= _KEPT else ""
            return Head(start, rest, place.start, len(text), message.content[:_FIRST_CHARACTERS])
    return None


class Heads:
    """Heads of recent prompts of one namespace and one template."""

    def __init__(self) -> None:
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self.size = 0
        """Characters that they hold."""

    def is_known(self, head: Head) -> bool:
        """Whether the head was there in a recent prompt."""
        return head.start in self._heads

    def but(self, head: Head) -> "Heads":
        """Those without a head, if it is there."""
        others = Heads()
        others._heads.update((start, each) for start, each in self._heads.items() if start != head.start)
        return others

    def changes(self, head: Head) -> tuple[Change, ...]:
        """What tells a new head from those before it, where that changes from prompt to prompt; else nothing."""
        latest = next(reversed(self._heads.values()), None)
        again = None if latest is None else self._again(latest, head)
        if again is not None:
            return (again,)
        beginning: tuple[Change, ...] = ()
        for old in islice(self._nearest(head), _MOST_TRIES):
            found = differences.compared(old.start, head.start, are_whole=len(head.start) == head.length)
            if found.parting is not None:
                beginning = beginning or tuple(_before(head, _looks(old, head, found.gaps), found.parting))
                continue
            head.family = old.family
            looks = [*_looks(old, head, found.gaps)]
            if not looks:  # as far as it is kept, it was there before
                return ()
            if not self._are_enough(head, looks):
                return tuple(_before(head, looks, len(head.start)))
            head.look = looks[0] if len(looks) == 1 else None
            return tuple(_changes(head, looks, len(head.start), self._more(old, head, found.gaps[-1])))
        return beginning

    def add(self, head: Head) -> None:
        """Remembers a head, or that it was there again."""
        old = self._heads.pop(head.start, None)
        if old is not None:
            head.family, head.look = old.family, old.look
            head.is_shared = old.is_shared or old.first != head.first
            self.size -= old.size
        self._heads[head.start] = head
        self.size += head.size
        if len(self._heads) > _MOST_HEADS:
            self.size -= self._heads.popitem(last=False)[1].size

    def _nearest(self, head: Head) -> Iterator[Head]:
        """Heads that may differ from this one in little, the likeliest first."""
        latest = next(reversed(self._heads.values()), None)
        if latest is not None and (
            differences.are_alike(latest.start, head.start) or differences.begin_alike(latest.start, head.start)
        ):
            yield latest
        first, last = head.start[:_EDGE], head.start[-_EDGE:]
        likely = []
        for place, old in enumerate(reversed(self._heads.values())):
            apart = abs(old.length - head.length)
            if apart <= differences.MOST_CHARACTERS and old is not latest:
                has_edge = old.start.startswith(first) or old.start.endswith(last)
                likely.append((not has_edge, apart, place, old))
        likely.sort()  # the later of two that are as near comes first; no two have the same place
        yield from (old for *_, old in likely[:_MOST_LOOKS] if differences.are_alike(old.start, head.start))

    def _are_enough(self, head: Head, looks: list[Look]) -> bool:
        """Whether so many heads are known that differ in these places alone that it is no accident."""
        kinds = {look.kind for look in looks}
        if Kind.TEXT not in kinds and not kinds <= _TRIED_OUT:
            return True
        before = head.start[: max(0, looks[0].start - _SLACK)]
        # What is cut off ends at another place where a value is longer.
        after = head.start[looks[-1].end + _SLACK :] if len(head.start) == head.length else ""
        # Heads that several conversations have are prompts of their own.
        alone = sum(
            not old.is_shared and old.start.startswith(before) and old.start.endswith(after) for old in self._kin(head)
        )
        return alone + 1 >= (_TEXTS if Kind.TEXT in kinds else _TRIALS)

    def _kin(self, head: Head) -> Iterator[Head]:
        """The heads that differ from one in a few places only."""
        return (old for old in self._heads.values() if old.family is head.family)

    def _again(self, old: Head, head: Head) -> Change | None:
        """The change, where all that changes is the value that was told to change before. Takes a third of the time."""
        look = old.look
        if look is None or look.kind is Kind.TEXT:
            return None
        after = old.start[look.end :]
        end = len(head.start) - len(after)
        is_alike = head.start.endswith(after) and head.start.startswith(old.start[: look.start])
        found = spans.looks(head.start, look.start, end) if is_alike and look.start < end else []
        if [(each.start, each.end) for each in found] != [(look.start, end)]:
            return None
        kind = spans.common(look.kind, found[0].kind)
        if kind is Kind.TEXT:
            return None
        head.family, head.look = old.family, Look(kind, look.start, end)
        return Change(head.look, after, self._more(old, head, Gap(look.start, look.end, look.start, end)))

    def _more(self, old: Head, head: Head, gap: Gap) -> int:
        """Characters after the kept part of a head that are the same: of the head itself, or of the conversation.

        Conversations may take turns, so those are of the head that this conversation had before.
        """
        if len(head.start) < head.length:
            return head.length - len(head.start) if old.length - gap.old_end == head.length - gap.end else 0
        own = (each for each in self._kin(head) if each.first == head.first)
        return max(_alike_after(each, head) for each in chain((old,), own))


def _alike_after(old: Head, head: Head) -> int:
    """Characters after two heads that are the same."""
    alike = differences.common_length(old.rest, 0, head.rest, 0)
    return min(old.total - old.length, head.total - head.length) if alike == _KEPT_AFTER else alike


def _looks(old: Head, head: Head, gaps: list[Gap]) -> Iterator[Look]:
    """What is in the gaps, in order: values, or a whole gap as text where there is more than values in it."""
    end = 0
    for gap in gaps:
        for look in _looks_in(old.start, head.start, gap):
            if look.start >= end:  # a long value can have two gaps in it
                yield look
                end = look.end


def _looks_in(old: str, text: str, gap: Gap) -> list[Look]:
    before, now = spans.looks(old, gap.old_start, gap.old_end), spans.looks(text, gap.start, gap.end)
    if len(before) == len(now) and (
        [*spans.between(old, gap.old_start, gap.old_end, before)] == [*spans.between(text, gap.start, gap.end, now)]
    ):
        changed = [
            Look(spans.common(one.kind, other.kind), other.start, other.end)
            for one, other in zip(before, now, strict=True)
            if old[one.start : one.end] != text[other.start : other.end]
        ]
        if changed:
            return changed
    return [Look(Kind.TEXT, gap.start, gap.end)]


def _changes(head: Head, looks: list[Look], end: int, more: int = 0) -> Iterator[Change]:
    """The values of a head that change, each with what is alike after it, the last one's up to `end`."""
    for look, after in pairwise(looks):
        yield Change(look, head.start[look.end : after.start])
    if looks:
        yield Change(looks[-1], head.start[looks[-1].end : end], more)


def _before(head: Head, looks: Iterable[Look], parting: int) -> Iterator[Change]:
    """What changes by nature before anything else does: that is in the way of all that is alike up to there."""
    sure, end = [], parting
    for look in looks:
        if look.kind is Kind.TEXT or look.kind in _TRIED_OUT:
            end = look.start
            break
        sure.append(look)
    while sure and end - sure[-1].end < _LEAST_ALIKE:
        end = sure.pop().start
    return _changes(head, sure, end)
