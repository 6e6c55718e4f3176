"""What looked wrong about a prompt but did not stop it, as the caller is told."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from hermes.v1 import assembler_pb2

ROLE_ORDER: Final = "ROLE_ORDER"
TOOL_RESULT_MISMATCH: Final = "TOOL_RESULT_MISMATCH"
CONTROL_TEXT: Final = "CONTROL_TEXT"
DYNAMIC_PREFIX: Final = "DYNAMIC_PREFIX"
UNSTABLE_HISTORY: Final = "UNSTABLE_HISTORY"
CODES: Final = (ROLE_ORDER, TOOL_RESULT_MISMATCH, CONTROL_TEXT, DYNAMIC_PREFIX, UNSTABLE_HISTORY)

# A conversation of ten thousand messages in a bad order is one thing to say, not ten thousand.
_MOST_OF_A_KIND: Final = 8


class Finding(NamedTuple):
    """code: stable upper-case name. message: a sentence. message_index: the message concerned, where one is.

    remedy: a sentence that says what to do, without a word of the caller's text.
    tokens: of the prompt, that have to be computed again because of it.
    start, end: the characters of the message's text that it is about, where it is about some.
    """

    code: str
    message: str
    message_index: int | None = None
    remedy: str = ""
    tokens: int = 0
    start: int | None = None
    end: int | None = None


def summed_up(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Of each code the first few findings, and how many more there are."""
    seen: Counter[str] = Counter()
    kept: list[Finding] = []
    for finding in findings:
        seen[finding.code] += 1
        if seen[finding.code] <= _MOST_OF_A_KIND:
            kept.append(finding)
    for code, count in seen.items():
        if count > _MOST_OF_A_KIND:
            remedy = next(each.remedy for each in kept if each.code == code)
            kept.append(Finding(code, f"There are {count - _MOST_OF_A_KIND} more findings of this kind.", None, remedy))
    return tuple(kept)


def as_warnings(findings: Iterable[Finding]) -> list[assembler_pb2.Warning]:
    """The findings as the contract has them."""
    return [
        assembler_pb2.Warning(
            code=each.code,
            message=each.message,
            message_index=each.message_index,
            remedy=each.remedy,
            tokens=each.tokens,
            start=each.start,
            end=each.end,
        )
        for each in findings
    ]
