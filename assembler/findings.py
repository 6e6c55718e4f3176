"""What looked wrong about a prompt but did not stop it, as the caller is told."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from hermes.v1 import assembler_pb2

ROLE_ORDER: Final = "ROLE_ORDER"
TOOL_RESULT_MISMATCH: Final = "TOOL_RESULT_MISMATCH"
CONTROL_TEXT: Final = "CONTROL_TEXT"

# A conversation of ten thousand messages in a bad order is one thing to say, not ten thousand.
_MOST_OF_A_KIND: Final = 8


class Finding(NamedTuple):
    """code: stable upper-case name. message: a sentence. message_index: the message concerned, where one is."""

    code: str
    message: str
    message_index: int | None = None


def summed_up(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Of each code the first few findings, and how many more there are."""
    seen: Counter[str] = Counter()
    kept = []
    for finding in findings:
        seen[finding.code] += 1
        if seen[finding.code] <= _MOST_OF_A_KIND:
            kept.append(finding)
    for code, count in seen.items():
        if count > _MOST_OF_A_KIND:
            kept.append(Finding(code, f"There are {count - _MOST_OF_A_KIND} more findings of this kind."))
    return tuple(kept)


def as_warnings(findings: Iterable[Finding]) -> list[assembler_pb2.Warning]:
    """The findings as the contract has them."""
    return [
        assembler_pb2.Warning(code=each.code, message=each.message, message_index=each.message_index)
        for each in findings
    ]
