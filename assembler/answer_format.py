"""How the answers to a prompt are read: what of them is reasoning, a tool call, or text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from assembler import call_formats, reasoning
from assembler.call_formats import FORMATS, FormatName
from assembler.marks import NO_MARKS, Marks
from assembler.model_files import ModelFiles
from assembler.reasoning import ReasoningMarks, ReasoningSplitter
from assembler.templates import ChatTemplate
from assembler.tokenizer import Tokenizer
from assembler.toolcalls import CallFormat, ToolCallFilter
from assembler.tools import ToolCall, read_tools
from hermes.v1 import assembler_pb2, types_pb2

ToolCallPolicy: TypeAlias = Literal["auto", "none"] | FormatName
ReasoningPolicy: TypeAlias = Literal["auto", "none"]

# Enough of the prompt's end for the mark that a generation prompt opens reasoning with, where it is no single token.
_PROMPT_END: Final = 16


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text from inside the reasoning marks."""

    text: str


# A str is text of the answer.
Part: TypeAlias = str | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What is recognised in the answers to one prompt.

    opened: the reasoning that the prompt ends with, None where it does not end in any.
    tools: names of those that the prompt offers, where the format asks for them.
    """

    marks: Marks = NO_MARKS
    reasoning: ReasoningMarks | None = None
    opened: str | None = None
    calls: CallFormat | None = None
    tools: frozenset[str] = frozenset()


PLAIN: Final = AnswerFormat()


class AnswerReader:
    """Reads one sample's answer, as its text comes."""

    def __init__(self, form: AnswerFormat) -> None:
        marks = form.marks
        self._marks = marks
        self._splitter = form.reasoning and ReasoningSplitter(form.reasoning, marks, form.opened)
        self._filter = form.calls and ToolCallFilter(form.calls, form.tools, marks)

    def feed(self, piece: str, *, last: bool = False) -> Sequence[Part]:
        """Takes the next piece and gives its parts in order. last: no more comes; nothing is held back."""
        parts: list[Part] = []
        if self._splitter:
            thought, piece = self._splitter.feed(piece, last=last)
            if thought := self._marks.shown(thought):
                parts.append(Reasoning(thought))
        if self._filter:
            parts += self._filter.feed(piece, last=last)
        elif piece := self._marks.shown(piece):
            parts.append(piece)
        return parts


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a template's answers."""

    reasoning: ReasoningMarks | None
    calls: CallFormat | None
    marks: Marks


class AnswerFormats:
    """Knows how to read the answers to the prompts of one model's templates."""

    def __init__(
        self, files: ModelFiles, tool_calls: ToolCallPolicy = "auto", reasoning_policy: ReasoningPolicy = "auto"
    ) -> None:
        """Renders some conversations to find out; a template that takes its time costs seconds."""
        self._tokenizer = files.tokenizer
        self._plain = _known(files.template, files.tokenizer, tool_calls, reasoning_policy)
        self._with_tools = (
            self._plain
            if files.tool_template is None
            else _known(files.tool_template, files.tokenizer, tool_calls, reasoning_policy)
        )

    def __str__(self) -> str:
        """For the log."""
        calls, marks = self._with_tools.calls, self._plain.reasoning
        return (
            f"tool calls are {'text' if calls is None else f'read as {calls.name} writes them'}, "
            f"reasoning is {'text' if marks is None else f'what stands between {marks.begin} and {marks.end}'}"
        )

    def of(self, prompt: assembler_pb2.Prompt, ids: Sequence[int]) -> AnswerFormat:
        """How answers to an assembled prompt are read. Those to text and to ids are text alone.

        Tool calls are recognised where the prompt offers tools.
        """
        if not prompt.HasField("chat"):
            return PLAIN
        chat = prompt.chat
        known = self._with_tools if chat.tools else self._plain
        calls = known.calls if chat.tools else None
        if known.reasoning is None and calls is None:
            return PLAIN
        offered = read_tools(chat.tools) if calls is not None and calls.bare else ()
        names = frozenset(tool.function["name"] for tool in offered)
        form = AnswerFormat(known.marks, known.reasoning, calls=calls, tools=names)
        if chat.continue_final_message:
            return _continued(form, chat.messages[-1])
        return replace(form, opened="") if self._opens(known.reasoning, ids) else form

    def _opens(self, marks: ReasoningMarks | None, ids: Sequence[int]) -> bool:
        return marks is not None and self._tokenizer.decode(ids[-_PROMPT_END:]).rstrip().endswith(marks.begin)


def _known(
    template: ChatTemplate | None, tokenizer: Tokenizer, tool_calls: ToolCallPolicy, reasoning_policy: ReasoningPolicy
) -> _Known:
    if template is None:
        return _Known(None, None, NO_MARKS)
    thoughts = reasoning.marks_of(template.words) if reasoning_policy == "auto" else None
    match tool_calls:
        case "auto":
            calls = call_formats.format_of(template)
        case "none":
            calls = None
        case _:
            calls = FORMATS[tool_calls]
    return _Known(thoughts, calls, Marks.of(tokenizer, (*(thoughts or ()), *(calls.marks if calls else ()))))


def _continued(form: AnswerFormat, message: types_pb2.Message) -> AnswerFormat:
    """The format of an answer whose beginning the caller wrote."""
    begun = message.content or "".join(part.text for part in message.content_parts)
    if form.reasoning is not None and begun.rfind(form.reasoning.begin) > begun.rfind(form.reasoning.end):
        return replace(form, opened=begun.rpartition(form.reasoning.begin)[2])
    if not begun.strip() and not message.reasoning:
        return form
    # What stands only at the beginning of an answer cannot come any more.
    return replace(form, reasoning=None, calls=form.calls and replace(form.calls, bare=False))
