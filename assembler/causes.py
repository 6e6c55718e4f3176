"""What recent prompts were warned of, summed up by namespace, for an operator."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from assembler.cache.key import tag_of
from assembler.findings import Finding

# Prompts of a namespace that are summed up, and namespaces.
_MOST_PROMPTS: Final = 1000
_MOST_NAMESPACES: Final = 256
# Prompts of all namespaces together, and different things to do about them: 10 MB at most, summed up in 30 ms.
_MOST_OF_ALL: Final = 20_000
_MOST_KINDS: Final = 4096
_SHOWN_CHARACTERS: Final = 64


class Kind(NamedTuple):
    """Findings that are counted together."""

    code: str
    remedy: str


@dataclass(slots=True)
class Cause:
    """prompts: so many had it. tokens: of theirs, that had to be computed again. last: monotonic seconds."""

    kind: Kind
    prompts: int = 0
    tokens: int = 0
    last: float = 0.0


class Summary(NamedTuple):
    """The recent prompts of a namespace. prompts: so many were looked at. causes: the costliest first."""

    namespace: str
    prompts: int
    causes: tuple[Cause, ...]


class _Told(NamedTuple):
    seconds: float
    tokens: tuple[tuple[Kind, int], ...]


class _Namespace(NamedTuple):
    name: str
    recent: deque[_Told | None]


class Causes:
    """The findings of recent prompts, without their messages. Bounded in namespaces, and in prompts of each and all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()
        self._prompts = 0
        # Prompts share them; of each prompt's own they would be most of what is kept.
        self._kinds: dict[Kind, Kind] = {}

    def add(self, namespace: str, findings: Iterable[Finding]) -> None:
        """A prompt is done; what was found."""
        tag = tag_of(namespace)
        recent = self._namespaces.setdefault(tag, _Namespace(shown(namespace), deque(maxlen=_MOST_PROMPTS))).recent
        self._namespaces.move_to_end(tag)
        tokens: dict[Kind, int] = {}
        for each in findings:
            kind = self._shared(Kind(each.code, each.remedy))
            tokens[kind] = tokens.get(kind, 0) + each.tokens
        self._prompts -= len(recent)
        recent.append(_Told(self._clock(), tuple(tokens.items())) if tokens else None)
        self._prompts += len(recent)
        while len(self._namespaces) > _MOST_NAMESPACES or self._prompts > _MOST_OF_ALL:
            self._prompts -= len(self._namespaces.popitem(last=False)[1].recent)

    def summaries(self, namespace: str | None = None) -> list[Summary]:
        """Of one namespace or of all, the costliest first."""
        chosen = self._namespaces if namespace is None else {tag_of(namespace)} & self._namespaces.keys()
        made = [_summary(*self._namespaces[each]) for each in chosen]
        return sorted(made, key=lambda each: -sum(cause.tokens for cause in each.causes))

    def forget(self, tag: str | None) -> None:
        """Forgets the namespace of that tag, or all."""
        for each in [each for each in self._namespaces if tag in (None, each)]:
            self._prompts -= len(self._namespaces.pop(each).recent)

    def _shared(self, kind: Kind) -> Kind:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        return self._kinds.setdefault(kind, kind)


def shown(namespace: str) -> str:
    """A namespace's name, if need be its beginning."""
    return namespace if len(namespace) <= _SHOWN_CHARACTERS else f"{namespace[:_SHOWN_CHARACTERS]}…"


def _summary(namespace: str, recent: deque[_Told | None]) -> Summary:
    causes: dict[Kind, Cause] = {}
    for told in recent:
        if told is not None:
            for kind, tokens in told.tokens:
                cause = causes.setdefault(kind, Cause(kind))
                cause.prompts += 1
                cause.tokens += tokens
                cause.last = told.seconds
    return Summary(
        namespace, len(recent), tuple(sorted(causes.values(), key=lambda cause: (-cause.tokens, -cause.prompts)))
    )
