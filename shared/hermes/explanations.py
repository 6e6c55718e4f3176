"""What comes back from a look at a prompt: its pieces, and what each cache has of them."""

from dataclasses import dataclass
from typing import Final, Literal

from hermes.answers import AssemblyInfo, assembly_info
from hermes.v1 import assembler_pb2

Kind = Literal["raw", "template", "content", "reasoning", "tool_call", "name", "tools", "variable"]

_KINDS: Final[dict[int, Kind]] = {
    assembler_pb2.Segment.KIND_TEMPLATE: "template",
    assembler_pb2.Segment.KIND_CONTENT: "content",
    assembler_pb2.Segment.KIND_REASONING: "reasoning",
    assembler_pb2.Segment.KIND_TOOL_CALL: "tool_call",
    assembler_pb2.Segment.KIND_NAME: "name",
    assembler_pb2.Segment.KIND_TOOLS: "tools",
    assembler_pb2.Segment.KIND_VARIABLE: "variable",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that belong together."""

    text: str
    token_ids: tuple[int, ...]
    kind: Kind
    """What the text is; raw in prompts without messages."""
    message_index: int | None
    """The message that it is from, in the list that was sent, where a `system` text comes first; else None."""
    control: bool
    """Whether it is a control token."""
    other_before: int
    """Characters at the text's beginning that are something else, but in the same token."""
    other_after: int
    """Such characters at its end."""
    cached_tokens: int
    """Of its tokens, from the first one on, those that the assembly cache has."""
    tree_cached_tokens: int
    """Those whose keys and values the executor's prefix tree has."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A way in which a chat template writes earlier turns differently than when they were new. Both are sentences."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prompt piece by piece: the segments' texts joined are its text, and their ids joined its ids."""

    request_id: str
    text: str
    segments: tuple[Segment, ...]
    info: AssemblyInfo
    tree_cached_tokens: int | None
    """What the executor's tree has of the prompt's beginning; None where it was not asked or did not answer."""
    rewrites: tuple[Rewrite, ...] = ()
    """What the chat's template does to earlier turns, so that they are computed again."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt's ids."""
        return tuple(token_id for segment in self.segments for token_id in segment.token_ids)


def explanation(response: assembler_pb2.ExplainResponse) -> Explanation:
    """The explanation of a response."""
    return Explanation(
        request_id=response.request_id,
        text=response.text,
        segments=tuple(map(_segment, response.segments)),
        info=assembly_info(response.info),
        tree_cached_tokens=response.tree_cached_tokens if response.HasField("tree_cached_tokens") else None,
        rewrites=tuple(Rewrite(each.message, each.remedy) for each in response.rewrites),
    )


def _segment(told: assembler_pb2.Segment) -> Segment:
    return Segment(
        text=told.text,
        token_ids=tuple(told.token_ids),
        kind=_KINDS.get(told.kind, "raw"),
        message_index=told.message_index if told.HasField("message_index") else None,
        control=told.control,
        other_before=told.other_before,
        other_after=told.other_after,
        cached_tokens=told.cached_tokens,
        tree_cached_tokens=told.tree_cached_tokens,
    )
