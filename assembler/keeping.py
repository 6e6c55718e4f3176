"""Keeps an answer's own ids, for when it comes back in a later turn of its conversation."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from assembler.drafts import Drafts, Sheet
from assembler.recall import CacheUse, Recall
from assembler.splice import Given, LostError, Outcome
from assembler.tokenizer import TokenIds
from assembler.workbench import Workbench
from shared.errors import HermesError

# Renders for the samples of one answer may take so long together; callers wait for them.
_MOST_SECONDS: Final = 0.25

_log: Final = logging.getLogger(__name__)


class Keeping:
    """Keeps the samples of one answer. Belongs to the event loop."""

    def __init__(
        self,
        drafts: Drafts,
        prompt: TokenIds,
        use: CacheUse,
        written: Callable[[], Awaitable[Sheet]],
        *,
        recall: Recall,
        bench: Workbench,
    ) -> None:
        """prompt: the ids that were answered. written: renders the chat that they are of, once for all samples."""
        self._drafts = drafts
        self._prompt = prompt
        self._use = use
        self._written = written
        self._recall = recall
        self._bench = bench
        self._sheet: Sheet | None = None
        self._left = _MOST_SECONDS

    async def keep(self, given: Given) -> None:
        """Keeps a sample's own ids, if they can be used again."""
        outcome = Outcome.KEPT
        try:
            key, ids = await self._gone_on(given)
            self._recall.keep_beginnings([(key, ids)], self._use, has_own=True)
        except LostError as error:
            outcome = error.outcome
        except Exception:  # whatever it was, the answer itself is whole
            _log.exception("the ids of an answer could not be kept")
            return
        await asyncio.sleep(0)  # of many samples that end at once, others wait for one
        _log.debug("an answer of %d tokens: %s", len(given.ids), outcome.value)
        self._recall.metrics.answered(outcome)

    async def _gone_on(self, given: Given) -> tuple[bytes, TokenIds]:
        """The beginning of the next turn that ends with the sample: its key, and its ids. Raises LostError."""
        if self._left <= 0:
            raise LostError(Outcome.LATE)
        try:
            sheet = self._sheet = self._sheet or await self._written()
        except HermesError as error:  # it took too long this time
            raise LostError(Outcome.REFUSED) from error
        seconds = self._drafts.pace.seconds(len(sheet.text), len(sheet.conversation.messages))
        self._left -= seconds
        if self._left <= 0:
            raise LostError(Outcome.LATE)
        return await self._bench.lasting(seconds, lambda: self._drafts.answered(sheet, self._prompt, given))
