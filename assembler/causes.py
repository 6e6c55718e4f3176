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
    tokens: dict[Kind, int]


class Causes:
    """The findings of recent prompts, without their messages. Bounded in namespaces, and in prompts of each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: OrderedDict[str, deque[_Told | None]] = OrderedDict()

    def add(self, namespace: str, findings: Iterable[Finding]) -> None:
        """A prompt is done; what was found."""
        recent = self._recent.get(namespace)
        if recent is None:
            recent = self._recent[namespace] = deque(maxlen=_MOST_PROMPTS)
            if len(self._recent) > _MOST_NAMESPACES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(namespace)
        tokens: dict[Kind, int] = {}
        for each in findings:
            kind = Kind(each.code, each.remedy)
            tokens[kind] = tokens.get(kind, 0) + each.tokens
        recent.append(_Told(self._clock(), tokens) if tokens else None)

    def summaries(self, namespace: str | None = None) -> list[Summary]:
        """Of one namespace or of all, the costliest first."""
        chosen = self._recent if namespace is None else {namespace} & self._recent.keys()
        made = [_summary(each, self._recent[each]) for each in chosen]
        return sorted(made, key=lambda each: -sum(cause.tokens for cause in each.causes))

    def forget(self, tag: str | None) -> None:
        """Forgets the namespace of that tag, or all."""
        for namespace in [each for each in self._recent if tag in (None, tag_of(each))]:
            del self._recent[namespace]


def _summary(namespace: str, recent: deque[_Told | None]) -> Summary:
    causes: dict[Kind, Cause] = {}
    for told in recent:
        if told is not None:
            for kind, tokens in told.tokens.items():
                cause = causes.setdefault(kind, Cause(kind))
                cause.prompts += 1
                cause.tokens += tokens
                cause.last = told.seconds
    return Summary(
        namespace, len(recent), tuple(sorted(causes.values(), key=lambda cause: (-cause.tokens, -cause.prompts)))
    )
