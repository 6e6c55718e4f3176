"""Where work is done: short work at once, long work on a thread, so that others need not wait."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

# So long work may hold the event loop: others wait longer for a thread that has work, and for what it holds.
_INLINE_SECONDS: Final = 0.002
# As many are encoded in that time.
_INLINE_CHARACTERS: Final = 49_152
# `tokenizers` takes 400 to 600 ns a character, fastokens 4 to 30.
_SLOWER: Final = 16
# A token is decoded in the time of so many characters, 380 to 500 ns.
_DECODED: Final = 12
# Bytes are digested at so many times the rate at which characters are encoded.
_DIGESTED_PER_ENCODED: Final = 16
# Only one can render at a time, and each keeps words that the tokenizer has met: 10 to 30 MB as a rule, 110 at most.
_MOST_THREADS: Final = 4


class Workbench:
    """Does work for an event loop. Owns the threads on which long work is done."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="assemble")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encoding(self, characters: int, work: Callable[[], T], *, slowly: bool = False) -> T:
        """Work that takes as long as encoding so many characters. slowly: with the slower library."""
        return await self._worked(_SLOWER * characters if slowly else characters, work)

    async def decoding(self, tokens: int, work: Callable[[], T]) -> T:
        """Work that takes as long as decoding so many tokens."""
        return await self._worked(_DECODED * tokens, work)

    async def digesting(self, characters: int, work: Callable[[], T]) -> T:
        """Work that takes as long as digesting so many characters."""
        return await self._worked(characters // _DIGESTED_PER_ENCODED, work)

    async def digesting_ahead(self, characters: int, work: Callable[[], object]) -> None:
        """Does work ahead of who would ask for its result, if digesting so many characters takes long."""
        if characters > _DIGESTED_PER_ENCODED * _INLINE_CHARACTERS:
            await self._beside(work)

    async def lasting(self, seconds: float, work: Callable[[], T]) -> T:
        """Work that takes so long."""
        return await self._beside(work) if seconds > _INLINE_SECONDS else work()

    async def _worked(self, characters: int, work: Callable[[], T]) -> T:
        return work() if characters <= _INLINE_CHARACTERS else await self._beside(work)

    async def _beside(self, work: Callable[[], T]) -> T:
        """Does work on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
