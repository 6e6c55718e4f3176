"""From a caller's prompt to token ids: the left column of the flow."""

import copy
import logging
import time
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple

from assembler import findings, limits, messages, templates, truncation
from assembler.beginnings import NOTHING, Beginnings, Known
from assembler.cache.entry import Entry
from assembler.chats import Chats
from assembler.drafts import Asked, Draft, Drafts, Origin, Sheet
from assembler.findings import Finding
from assembler.insight import Insight, Onlooker
from assembler.keeping import Keeping
from assembler.messages import Conversation
from assembler.model_files import ModelFiles
from assembler.orders import Assembled, Order, Policies
from assembler.recall import Recall
from assembler.truncation import Truncated, Window
from assembler.workbench import Workbench
from hermes.v1 import assembler_pb2
from shared.errors import invalid_argument
from shared.logs import head_tail

# Own ids of answers are a few more or fewer than tokenizing gives, 1% of the answers' tokens as a rule.
_NEARLY: Final = 0.9

_log: Final = logging.getLogger(__name__)


class _Made(NamedTuple):
    """A prompt. text: None where it was not at hand. cached_tokens, origin: as Assembled has them.

    passing: findings that are true of this prompt after those before it, and so not kept with it.
    """

    entry: Entry
    text: str | None = None
    template_version: str = ""
    cached_tokens: int = 0
    origin: Origin | None = None
    passing: tuple[Finding, ...] = ()


class Assembler:
    """Assembles prompts for one model. Owns the threads on which long ones are worked on."""

    def __init__(self, files: ModelFiles, policies: Policies | None = None, recall: Recall | None = None) -> None:
        """recall: None where nothing is remembered. Takes a fraction of a second, for trying what the files promise."""
        self.files = files
        self._policies = policies or Policies()
        self._recall = recall or Recall.of_nothing()
        self._metrics = self._recall.metrics
        beginnings = Beginnings(files.tokenizer, self._recall.beginning_keys)
        self.chats = Chats(files, self._policies, beginnings)
        self._bench = Workbench()
        self.insight = Insight(files.tokenizer, self._bench) if self._policies.insight else None

    def close(self) -> None:
        self._bench.close()

    def forget(self, tag: str | None) -> None:
        """Forgets what is remembered beside the cache of the namespace of that tag, or of all."""
        self.chats.forget(tag)
        if self.insight is not None:
            self.insight.forget(tag)

    def looking(self) -> "Assembler":
        """The same assembler for one who only looks: its assemblies leave no trace in cache, metrics and insight."""
        onlooker = copy.copy(self)
        onlooker._recall = self._recall.looking()
        onlooker._metrics = onlooker._recall.metrics
        onlooker.insight = self.insight and Onlooker(self.insight)
        return onlooker

    @property
    def bench(self) -> Workbench:
        """Where what is long is to be worked on."""
        return self._bench

    def conversation(self, chat: assembler_pb2.Chat) -> Conversation:
        """A chat as `assemble` reads it; raises the same."""
        return messages.canonical(chat, self._policies.unknown_role)

    async def assemble(self, order: Order) -> Assembled:
        """The prompt's token ids. Raises HermesError for everything that is wrong with the prompt."""
        started = time.perf_counter()
        limits.check_count(order.prompt, None if order.fitting.window else order.max_tokens)
        match order.prompt.WhichOneof("input"):
            case "chat" | "text" as kind:
                made = await (self._chat(order) if kind == "chat" else self._text(order))
                self._recall.told(len(made.entry.ids), made.cached_tokens, order.cache)
            case "token_ids":
                given = order.prompt.token_ids.ids
                ids = await self._bench.decoding(len(given), lambda: limits.checked_ids(given, self.files.vocab_size))
                made = _Made(Entry(ids, time.time()))
            case _:
                raise invalid_argument(
                    "PROMPT_MISSING", "The request has no prompt: set chat, text or token_ids.", field="prompt"
                )
        ids, text = made.entry.ids, made.text
        found = (*made.entry.findings, *made.passing)
        self._found(found, order)
        limits.check_length(len(ids), order.max_tokens)
        if text is None and (order.return_text or self._policies.log_head_tail):
            text = await self._bench.decoding(len(ids), lambda: self.files.tokenizer.decode(ids))
        if self._policies.log_head_tail and text is not None:
            _log.info("prompt of %d tokens: %s", len(ids), head_tail(text))
        return Assembled(
            ids=ids,
            text=text if order.return_text else None,
            template_version=made.template_version,
            seconds=time.perf_counter() - started,
            findings=found,
            cached_tokens=made.cached_tokens,
            dropped_rounds=made.entry.dropped_rounds,
            origin=made.origin,
        )

    def keeping(self, order: Order, assembled: Assembled) -> Keeping | None:
        """Keeps the samples of the prompt's answer; None where they are not to be kept."""
        origin = assembled.origin
        if origin is None or not order.cache.write:
            return None

        async def written() -> Sheet:
            return origin.sheet or await self._written(order, origin.drafts, origin.now, origin.dropped_rounds)

        return Keeping(origin.drafts, assembled.ids, order.cache, written, recall=self._recall, bench=self._bench)

    async def _chat(self, order: Order) -> _Made:
        """A chat's prompt, from the cache or made anew."""
        drafts = self.chats.drafts(order.prompt.chat)
        now = order.now or datetime.now()  # noqa: DTZ005 - templates print the local date
        version, printed = drafts.template.version, drafts.template.clock.printed(now)
        key = await self._key(order, order.fitting.asked, printed)

        def is_new() -> bool:
            return drafts.goes_on(order.prompt.chat.messages, order.cache.namespace)

        with self._metrics.stage("lookup"):
            entry = await self._recall.prompt(key, order.cache, is_new=is_new)
        if entry is not None:
            return await self._known(order, entry, Origin(drafts, now, entry.dropped_rounds, None))
        sheet = await self._written(order, drafts, now)
        whole = await self._tokenized(order, drafts, sheet)
        fitted = await self._fitted(order, drafts, whole)
        draft = fitted.prompt
        limits.check_length(draft.tokens, order.max_tokens)
        odd, passing = await self._looked_at(drafts, fitted, order)
        found = findings.summed_up((*sheet.rendered.findings, *odd))
        entry = Entry(draft.ids, time.time(), fitted.dropped_rounds, found)
        self._recall.keep_prompt(key, entry, order.cache)
        for each in (draft,) if draft is whole else (whole, draft):
            self._recall.keep_beginnings(each.made, order.cache, has_own=each.has_own)
        origin = Origin(drafts, now, fitted.dropped_rounds, draft.sheet)
        return _Made(entry, draft.sheet.text, version, draft.known_tokens, origin, passing)

    async def _known(self, order: Order, entry: Entry, origin: Origin) -> _Made:
        """A chat's prompt from the cache."""
        text, passing = None, tuple[Finding, ...]()
        if order.return_text:
            sheet = await self._written(order, origin.drafts, origin.now, entry.dropped_rounds)
            text = sheet.text
            if self.insight is not None:
                passing = await self.insight.again(origin.drafts, sheet, entry.ids, order.cache)
        return _Made(entry, text, origin.drafts.template.version, len(entry.ids), origin, passing)

    async def _text(self, order: Order) -> _Made:
        """The prompt of a raw text, from the cache or made anew."""
        text = order.prompt.text
        key = await self._key(order)
        with self._metrics.stage("lookup"):
            entry = await self._recall.prompt(key, order.cache)
        if entry is not None:
            return _Made(entry, text, cached_tokens=len(entry.ids))
        await self._refuse_early(text, 0, order)
        with self._metrics.stage("tokenize"):
            ids = await self._bench.encoding(
                len(text), lambda: self.files.tokenizer.encode_raw(text), slowly=self._is_slow()
            )
        entry = Entry(ids, time.time())
        limits.check_length(len(ids), order.max_tokens)
        self._recall.keep_prompt(key, entry, order.cache)
        return _Made(entry, text)

    async def _key(self, order: Order, *fields: str | None) -> bytes | None:
        if not order.cache.any:
            return None
        data = order.prompt.SerializeToString(deterministic=True)
        return await self._bench.digesting(len(data), lambda: self._recall.key(data, order.cache, *fields))

    async def _written(self, order: Order, drafts: Drafts, now: datetime, without_rounds: int = 0) -> Sheet:
        """The chat as the template writes it, its roles and contents normalized."""
        chat = order.prompt.chat

        def work() -> Sheet:
            options = templates.options_of(chat, now)
            conversation = messages.canonical(chat, self._policies.unknown_role)
            if without_rounds:
                conversation = truncation.without(conversation, without_rounds)
            namespace = order.cache.namespace if order.cache.any else None
            return drafts.sheet(conversation, Asked(options, chat.template_kwargs_json, namespace, order.cache.write))

        # Bytes on the wire are about characters, and counting them is quick however many messages there are.
        with self._metrics.stage("render"):
            return await self._bench.lasting(drafts.pace.seconds(chat.ByteSize(), len(chat.messages)), work)

    async def _tokenized(self, order: Order, drafts: Drafts, sheet: Sheet) -> Draft:
        """Takes the known beginning's ids and tokenizes the rest."""
        with self._metrics.stage("lookup"):
            await self._bench.digesting_ahead(len(sheet.text), sheet.plan.candidates.make_all)
            known = await self._recall.beginning(sheet.plan, sheet.text, order.cache)
        if order.fitting.window is None:
            # With other ids for its answers the prompt may fit.
            counted = NOTHING if known.has_own else known
            await self._refuse_early(sheet.text[counted.end :], len(counted.ids), order)
        with self._metrics.stage("tokenize"):
            return await self._drafted(drafts, sheet, known)

    async def _drafted(self, drafts: Drafts, sheet: Sheet, known: Known) -> Draft:
        length = len(sheet.text) - known.end
        return await self._bench.encoding(length, lambda: drafts.draft(sheet, known), slowly=self._is_slow(sheet))

    async def _fitted(self, order: Order, drafts: Drafts, whole: Draft) -> Truncated[Draft]:
        """The draft without its oldest rounds, if it is too long and the caller wants that.

        How long it is, and where it is cut, do not depend on what is known of it: that goes by the ids that tokenizing
        gives.
        """
        window = order.fitting.window
        most = order.max_tokens if window is None else window.tokens
        if most is None or whole.tokens <= most * (_NEARLY if whole.has_own else 1):
            return Truncated(whole, 0, range(0))
        with self._metrics.stage("truncate"):
            counted = await self._drafted(drafts, whole.sheet, NOTHING) if whole.has_own else whole
            if window is None or counted.tokens <= most:
                return Truncated(whole if whole.tokens <= most else counted, 0, range(0))
            fitted = await self._cut(order, drafts, counted, window)
            left = fitted.prompt.sheet
            known = await self._recall.beginning_of_part(left.plan, left.text, order.cache)
            if len(known.ids) <= fitted.prompt.known_tokens:
                return fitted
            # With its own ids an answer may be longer, and what fitted need not fit any more.
            draft = await self._drafted(drafts, left, known)
            return fitted if draft.tokens > window.tokens else replace(fitted, prompt=draft)

    async def _cut(self, order: Order, drafts: Drafts, whole: Draft, window: Window) -> Truncated[Draft]:
        sheet = whole.sheet

        def attempt(conversation: Conversation) -> Draft:
            shorter = drafts.sheet(conversation, sheet.asked)
            known = self._recall.beginning_in_memory(shorter.plan, order.cache)
            return drafts.draft(shorter, NOTHING if known.has_own else known)

        return await self._bench.encoding(
            len(sheet.text),
            lambda: truncation.truncated(sheet.conversation, whole, window, attempt),
            slowly=self._is_slow(sheet),
        )

    async def _looked_at(
        self, drafts: Drafts, fitted: Truncated[Draft], order: Order
    ) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """What keeps the caches from hitting a prompt: by itself, and after those before it."""
        if self.insight is None:
            return (), ()
        passing = await self.insight.prefix(drafts, fitted.prompt, order.cache)
        return await self.insight.history(drafts, fitted), passing

    def _found(self, found: tuple[Finding, ...], order: Order) -> None:
        """Counts what was found."""
        self._metrics.warned(found)
        if self.insight is not None:
            self.insight.add(order.cache.namespace, found)

    async def _refuse_early(self, text: str, known_tokens: int, order: Order) -> None:
        """Refuses a text that cannot fit, without tokenizing it."""
        if order.max_tokens is None:
            return
        room = order.max_tokens - known_tokens
        least = await self._bench.encoding(len(text), lambda: self.files.tokenizer.least_tokens(text, above=room))
        limits.check_least(known_tokens + least, order.max_tokens)

    def _is_slow(self, sheet: Sheet | None = None) -> bool:
        """Whether a text takes the slower library to encode."""
        is_guarded = sheet is not None and sheet.rendered.reading.live is not None
        return is_guarded or self.files.tokenizer.encodes_with != "fastokens"
