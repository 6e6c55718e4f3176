"""What was assembled before, as the pipeline asks for it: whole prompts and beginnings, counted as they are found."""

import copy
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Self

from prometheus_client import CollectorRegistry

from assembler.beginnings import NOTHING, Known, Plan
from assembler.cache.cache import AssemblyCache, Hit
from assembler.cache.entry import Entry
from assembler.cache.key import Keys
from assembler.cache.memory import MemoryTier
from assembler.metrics import AssemblerMetrics, Uncounted
from assembler.tokenizer import TokenIds

# To look on disk takes about as long as to tokenize so many characters (0.1 ms; 0.3 µs a token): not for fewer.
_WORTH_A_LOOK: Final = 1024
# A beginning stands a few messages before the end, or with other conversations' at the system part's end.
_MOST_KEYS: Final = 16


class CacheUse(NamedTuple):
    """Who shares with a request, and whether it takes from the cache and adds to it."""

    namespace: str = ""
    read: bool = True
    write: bool = True

    @property
    def any(self) -> bool:
        """Whether the request has to do with the cache at all."""
        return self.read or self.write


COMMON: Final = CacheUse()
NONE: Final = CacheUse(read=False, write=False)


class Recall:
    """Whole prompts by their request, beginnings by their text."""

    def __init__(
        self, cache: AssemblyCache, metrics: AssemblerMetrics, *, server_facts: Iterable[str], text_facts: Iterable[str]
    ) -> None:
        """server_facts: everything of the server that can change what a request becomes.
        text_facts: what of it can change the ids of a rendered text.
        """
        self._cache = cache
        self.metrics = metrics
        self._keys = Keys("prompt", server_facts)
        self.beginning_keys = Keys("beginning", text_facts)

    @classmethod
    def of_nothing(cls) -> Self:
        """What an assembler without a cache has."""
        metrics = AssemblerMetrics("", CollectorRegistry())
        memory = MemoryTier(max_bytes=0, max_age=0, on_evict=metrics.forgotten)
        return cls(AssemblyCache(memory), metrics, server_facts=(), text_facts=())

    def looking(self) -> Self:
        """The same for one who only looks: nothing is kept, counted or moved."""
        onlooker = copy.copy(self)
        onlooker._cache, onlooker.metrics = self._cache.looking(), Uncounted()
        return onlooker

    def key(self, prompt: bytes, use: CacheUse, *fields: str | None) -> bytes | None:
        """The key of a whole prompt, as the caller's message has it; None for one that cannot be kept.

        fields: what else can change it; None where that cannot be told.
        """
        if None in fields:
            return None
        return self._keys.key(
            use.namespace.encode(), prompt, *(field.encode() for field in fields if field is not None)
        )

    async def prompt(
        self, key: bytes | None, use: CacheUse, *, is_new: Callable[[], bool] = lambda: False
    ) -> Entry | None:
        """The prompt under a key, where the request may have it. is_new: whether nobody seems to have asked for it
        before, so that it is not worth a look on disk.
        """
        if not use.read:
            return None
        keys = () if key is None else (key,)
        hit = self._cache.recall(keys)
        if hit is None and not is_new():
            hit = await self._cache.fetch(keys, use.namespace)
        self.metrics.looked_up("miss" if hit is None else hit.tier.value)
        return None if hit is None else hit.entry

    async def beginning(self, plan: Plan, text: str, use: CacheUse) -> Known:
        """The longest beginning of a text that is known."""
        if not use.read or not plan.candidates:
            return NOTHING
        hit = await self._found(plan, text, use)
        self.metrics.looked_for_beginning("miss" if hit is None else hit.tier.value)
        return _known(plan, hit)

    async def beginning_of_part(self, plan: Plan, text: str, use: CacheUse) -> Known:
        """As `beginning`, uncounted, for what is left of a conversation that was looked up as a whole."""
        return _known(plan, await self._found(plan, text, use)) if use.read and plan.candidates else NOTHING

    async def _found(self, plan: Plan, text: str, use: CacheUse) -> Hit | None:
        hit = self._cache.recall(each.key for each in plan.candidates)
        end = _end(plan, hit)
        # Where this process was not asked, another one may have answered, with ids that tokenizing does not give.
        if len(text) - end > _WORTH_A_LOOK or end < plan.asked:
            longer = [each.key for each in plan.candidates if each.end > end]
            # The shortest of them is the system part's, if that is unknown.
            keys = longer if len(longer) <= _MOST_KEYS else [*longer[: _MOST_KEYS - 1], *self._system(plan, end)]
            hit = await self._cache.fetch(keys, use.namespace) or hit
        return hit

    def beginning_in_memory(self, plan: Plan, use: CacheUse) -> Known:
        """As `beginning`, without a look on disk and uncounted, from any thread."""
        return _known(plan, self._cache.recall(each.key for each in plan.candidates) if use.read else None)

    def keep_prompt(self, key: bytes | None, entry: Entry, use: CacheUse) -> None:
        """Keeps a prompt, where the request allows it."""
        if use.write and key is not None:
            self._cache.keep(key, entry, use.namespace)

    def keep_beginnings(self, made: Iterable[tuple[bytes, TokenIds]], use: CacheUse, *, has_own: bool) -> None:
        """Keeps beginnings, where the request allows it. has_own: as Entry has it."""
        if use.write:
            for key, ids in made:
                self._cache.keep(key, Entry(ids, time.time(), has_own=has_own), use.namespace)

    def told(self, tokens: int, known_tokens: int, use: CacheUse) -> None:
        """Counts a prompt that is done, if it was looked up."""
        if use.read:
            self.metrics.prompt(tokens, known_tokens, "exact" if known_tokens == tokens else "beginning")

    @staticmethod
    def _system(plan: Plan, end: int) -> list[bytes]:
        """The key of the shortest beginning worth keeping, if it is longer than what is known."""
        return [each.key for each in plan.worth[:1] if each.end > end]


def _end(plan: Plan, hit: Hit | None) -> int:
    return 0 if hit is None else next(each.end for each in plan.candidates if each.key == hit.key)


def _known(plan: Plan, hit: Hit | None) -> Known:
    return NOTHING if hit is None else Known(_end(plan, hit), hit.entry.ids, hit.entry.has_own)
