"""Why the caches miss: beginnings of prompts that change from one to the next, and templates that rewrite history.

DYNAMIC_PREFIX: prompts of one namespace and template are compared with those before them. A date in the system text
keeps all that comes after it from being computed once. A prompt whose beginning was there before, in another turn of
its conversation or in another conversation, costs a look-up; a new one is compared with those that are most like it.

UNSTABLE_HISTORY: for templates of which it was found at load that they rewrite earlier turns (`histories.py`).

What is remembered of prompts is in this process's memory alone, bounded, and never told to anybody else: a warning
quotes only the text of the caller who gets it.
"""

import hashlib
import json
import logging
from collections import OrderedDict
from typing import Final, NamedTuple

from assembler import heads, histories, places
from assembler.cache.key import tag_of
from assembler.causes import Causes, Summary, shown
from assembler.drafts import Asked, Draft, Drafts, Sheet
from assembler.findings import DYNAMIC_PREFIX, UNSTABLE_HISTORY, Finding
from assembler.heads import Change, Head, Heads
from assembler.histories import Rewrite
from assembler.messages import Conversation, Role
from assembler.recall import CacheUse
from assembler.spans import Kind
from assembler.templates import RenderOptions
from assembler.tokenizer import TokenIds, Tokenizer
from assembler.tools import Tool
from assembler.truncation import Truncated
from assembler.workbench import Workbench

# Heads of so many namespaces and templates, and so many characters of them: 8 MiB, or 32 where emoji are among them.
_MOST_SCOPES: Final = 256
_MOST_CHARACTERS: Final = 8 * 1024**2
# Stretches whose tokens were counted; the prompts of one pattern have the same ones.
_MOST_STRETCHES: Final = 64
# What the log was told.
_MOST_SAID: Final = 1024
# Of a value that is quoted.
_QUOTED_CHARACTERS: Final = 48
# What an unstable history costs below this is what a template's marks take.
_LEAST_LOST: Final = 8

# Of which it is enough to know the tokens by those of the whole prompt.
_FEW_CHARACTERS: Final = 64
# Characters of tools that are looked through: half a millisecond.
_LONG_TOOLS: Final = 131_072

_log: Final = logging.getLogger(__name__)


class _Scope(NamedTuple):
    """Prompts that may have their beginning in common. tag: of their namespace, whose name can be long."""

    tag: str
    template_version: str


class Insight:
    """Looks at prompts as they are made. Its methods are called from the event loop."""

    def __init__(self, tokenizer: Tokenizer, bench: Workbench) -> None:
        self._tokenizer = tokenizer
        self._bench = bench
        self._heads: OrderedDict[_Scope, Heads] = OrderedDict()
        self._characters = 0
        self._counted: OrderedDict[bytes, int] = OrderedDict()
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._causes = Causes()

    def add(self, namespace: str, findings: tuple[Finding, ...]) -> None:
        """A prompt is done; what was found, by whomever."""
        self._causes.add(namespace, findings)

    def summaries(self, namespace: str | None = None) -> list[Summary]:
        """What was found in recent prompts of one namespace, or of all."""
        return self._causes.summaries(namespace)

    def forget(self, tag: str | None) -> None:
        """Forgets the prompts of the namespace of that tag, or of all."""
        self._causes.forget(tag)
        for scope in [each for each in self._heads if tag in (None, each.tag)]:
            self._characters -= self._heads.pop(scope).size

    async def prefix(self, drafts: Drafts, draft: Draft, use: CacheUse) -> tuple[Finding, ...]:
        """What keeps a prompt's beginning from being another's: DYNAMIC_PREFIX, for each value that changes.

        A request that does not take from the caches is not told; one that does not add to them is not remembered.
        """
        sheet, messages = draft.sheet, draft.sheet.conversation.messages
        # A system text that goes along to the last question is no beginning; what that costs is UNSTABLE_HISTORY's.
        has_moved = Rewrite.SYSTEM in drafts.history.rewrites and sum(each.role is Role.USER for each in messages) > 1
        head = heads.head_of(sheet.text, messages) if use.any and not has_moved else None
        if head is None:
            return ()
        changes = self._changes(_Scope(tag_of(use.namespace), drafts.template.version), head, use)
        costs = await self._costs(changes, draft)
        return tuple([self._told(*each, draft, use.namespace) for each in zip(changes, costs, strict=True)])

    async def again(self, drafts: Drafts, sheet: Sheet, ids: TokenIds, use: CacheUse) -> tuple[Finding, ...]:  # noqa: ARG002
        """What is told of a prompt that was there before, as a whole: nothing."""
        return ()

    async def history(self, drafts: Drafts, fitted: Truncated[Draft]) -> tuple[Finding, ...]:
        """What the template's way with earlier turns costs a prompt: UNSTABLE_HISTORY."""
        sheet = fitted.prompt.sheet
        if drafts.history.keeps(sheet.conversation):
            return ()
        conversation, kwargs_json = sheet.conversation, sheet.asked.kwargs_json

        def render(earlier: Conversation, options: RenderOptions) -> str:
            return drafts.sheet(earlier, Asked(options, kwargs_json, None)).text

        lost = await self._bench.lasting(
            2 * drafts.pace.seconds(conversation.characters, len(conversation.messages)),
            lambda: histories.lost(sheet.text, conversation, sheet.asked.options, render),
        )
        if lost is None:
            return ()
        tokens = await self._tokens(sheet.text[lost.start : lost.end])
        if tokens < _LEAST_LOST:
            return ()
        message = (
            "The model's chat template writes earlier turns in another way than when they were new "
            f"({drafts.history}): {tokens} tokens that the last turn had "
            "cannot come from the prefix cache."
        )
        index = lost.message_index + (len(fitted.dropped) if lost.message_index >= fitted.dropped.start else 0)
        return (Finding(UNSTABLE_HISTORY, message, index, drafts.history.rewrites[0].remedy, tokens),)

    def _changes(self, scope: _Scope, head: Head, use: CacheUse) -> tuple[Change, ...]:
        """What a new head changes."""
        recent = self._heads.pop(scope, None)
        changes = () if recent is None or not use.read or recent.is_known(head) else recent.changes(head)
        if use.write:
            recent = Heads() if recent is None else recent
            self._characters -= recent.size
            recent.add(head)
            self._characters += recent.size
        if recent is not None:
            self._heads[scope] = recent  # as the last that was asked for
            self._make_room(scope)
        return changes

    def _make_room(self, kept: _Scope) -> None:
        """Forgets the namespaces that were longest without a prompt."""
        while len(self._heads) > _MOST_SCOPES or self._characters > _MOST_CHARACTERS:
            scope = next(iter(self._heads))
            if scope == kept:
                return
            self._characters -= self._heads.pop(scope).size

    async def _costs(self, changes: tuple[Change, ...], draft: Draft) -> list[int]:
        """Tokens that each change keeps from the prefix cache."""
        text, alike = draft.sheet.text, [change.alike for change in changes]
        counted = [await self._known_tokens(each) for each in alike]
        tokens, characters = draft.tokens, len(text)
        # What is not kept, or is another conversation's, is not worth an encoding: as many as in the prompt's rest.
        if changes and changes[-1].more > _FEW_CHARACTERS:
            before = text[: changes[0].look.start]
            values = " ".join(text[change.look.start : change.look.end] for change in changes)
            tokens -= sum(counted) + await self._known_tokens(before) + await self._tokens(values)
            characters -= sum(map(len, (before, values, *alike)))
        return [one + change.more * tokens // characters for one, change in zip(counted, changes, strict=True)]

    def _told(self, change: Change, tokens: int, draft: Draft, namespace: str) -> Finding:
        """A change as the caller is told, and the log once."""
        where, value = _where(change, draft)
        kind = change.look.kind
        quoted = value if len(value) <= _QUOTED_CHARACTERS else f"{value[:_QUOTED_CHARACTERS]}…"
        self._say_once(namespace, f"{where.name} {where.verb} {kind.value}", tokens)
        return Finding(
            DYNAMIC_PREFIX,
            f"{where.name[:1].upper()}{where.name[1:]} {where.verb} {kind.value}, {quoted!r}, which is another one in "
            f"other prompts: the {tokens} tokens after it that are alike cannot come from the prefix cache.",
            where.message_index,
            where.remedy.format(_noun(kind)),
            tokens,
            where.start,
            None if where.start is None else where.start + len(value),
        )

    async def _known_tokens(self, stretch: str) -> int:
        """Tokens of a stretch that other prompts may have too. Its text is not kept, which may be nobody else's."""
        key = hashlib.blake2b(stretch.encode(), digest_size=16).digest()
        tokens = self._counted.pop(key, None)
        if tokens is None:
            tokens = await self._tokens(stretch)
        self._counted[key] = tokens
        if len(self._counted) > _MOST_STRETCHES:
            self._counted.popitem(last=False)
        return tokens

    async def _tokens(self, stretch: str) -> int:
        slowly = self._tokenizer.encodes_with != "fastokens"
        ids = await self._bench.encoding(len(stretch), lambda: self._tokenizer.encode(stretch), slowly=slowly)
        return len(ids)

    def _say_once(self, namespace: str, what: str, tokens: int) -> None:
        said = tag_of(namespace), what
        if said in self._said:
            return
        self._said[said] = None
        if len(self._said) > _MOST_SAID:
            self._said.popitem(last=False)
        _log.warning(
            "prompts of %s begin differently, which costs %d tokens of the prefix cache with each: %s (said once)",
            f"namespace {shown(namespace)!r}" if namespace else "the namespace without a name",
            tokens,
            what,
        )


class Onlooker(Insight):
    """Tells what another would tell of a prompt, whether or not that has seen it; and nothing comes of it."""

    def __init__(self, watched: Insight) -> None:
        super().__init__(watched._tokenizer, watched._bench)
        self._heads = watched._heads

    def add(self, namespace: str, findings: tuple[Finding, ...]) -> None:
        """Nothing."""

    async def again(self, drafts: Drafts, sheet: Sheet, ids: TokenIds, use: CacheUse) -> tuple[Finding, ...]:
        """What was told when the prompt was new."""
        return await self.prefix(drafts, Draft(sheet, ids, len(ids), ()), use)

    def _changes(self, scope: _Scope, head: Head, use: CacheUse) -> tuple[Change, ...]:
        recent = self._heads.get(scope) if use.read else None
        return () if recent is None else recent.but(head).changes(head)

    def _say_once(self, namespace: str, what: str, tokens: int) -> None:
        """Nothing."""


class _Where(NamedTuple):
    """Where a change is. start: its place in the message's text. remedy: a sentence with a hole for what it is."""

    name: str
    verb: str
    remedy: str
    message_index: int | None = None
    start: int | None = None


_MESSAGE_REMEDY: Final = (
    "Move {{}} in message {} to the last user message; then all that comes before that is the same in all prompts, and "
    "computed once."
)
_TEMPLATE: Final = _Where(
    "the chat template",
    "writes",
    "Serve a chat template that does not write {} (`template` in the settings), or set what it reads that from to the "
    "same in all prompts; the model can be told in the last user message.",
)
_TOOLS: Final = _Where(
    "a tool's description",
    "has",
    "Leave {} out of the tools' descriptions, or make it the same in all prompts; the model can be told in the last "
    "user message.",
)
_VARIABLES: Final = _Where(
    "template_kwargs_json",
    "has",
    "Leave {} out of template_kwargs_json; the model can be told in the last user message.",
)


def _where(change: Change, draft: Draft) -> tuple[_Where, str]:
    """Also the value: of what begins in a message, its part in that."""
    sheet, look = draft.sheet, change.look
    for place in places.of(sheet.text, sheet.conversation.messages):
        if place.start > look.start:
            break
        if look.start < place.end:
            start = look.start - place.start + place.skipped
            index = place.message_index
            value = sheet.text[look.start : min(look.end, place.end)]
            return _Where(f"message {index}", "has", _MESSAGE_REMEDY.format(index), index, start), value
    value = sheet.text[look.start : look.end]
    if value in sheet.asked.kwargs_json:
        return _VARIABLES, value
    return _TOOLS if _is_in_tools(value, sheet.conversation.tools) else _TEMPLATE, value


def _is_in_tools(value: str, tools: tuple[Tool, ...]) -> bool:
    if sum(tool.characters for tool in tools) > _LONG_TOOLS:  # whatever changes in such a prompt, it is likely theirs
        return True
    return any(value in json.dumps(tool.function, ensure_ascii=False) for tool in tools)


def _noun(kind: Kind) -> str:
    """`the date` of `a date`."""
    return f"the {kind.value.partition(' ')[2].partition(',')[0]}"
