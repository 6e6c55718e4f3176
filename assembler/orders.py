"""What is asked of the assembler, and what comes of it."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from assembler.drafts import Origin
from assembler.findings import Finding
from assembler.messages import UnknownRole
from assembler.order import OrderPolicy
from assembler.recall import NONE, CacheUse
from assembler.rendering import ControlPolicy
from assembler.tokenizer import TokenIds
from assembler.truncation import Window
from hermes.v1 import assembler_pb2


class Fitting(NamedTuple):
    """What is done with a chat that is too long. window: None where it is refused, else its oldest rounds are dropped.

    asked: what the caller said of it, which is part of the prompt's key.
    """

    window: Window | None = None
    asked: str = ""


_REFUSED: Final = Fitting()


@dataclass(frozen=True, slots=True)
class Order:
    """A prompt to assemble. max_tokens: it may have this many; None is no limit. now: the time that it may print; else
    that of its assembly.
    """

    prompt: assembler_pb2.Prompt
    max_tokens: int | None
    return_text: bool = False
    fitting: Fitting = _REFUSED
    cache: CacheUse = NONE
    now: datetime | None = None


@dataclass(frozen=True, slots=True)
class Policies:
    """How prompts are read. log_head_tail: the log gets the first and the last characters of each prompt.

    insight: prompts are looked at for what keeps the caches from hitting.
    """

    unknown_role: UnknownRole = "error"
    order: OrderPolicy = field(default_factory=OrderPolicy)
    control_text: ControlPolicy = "encode"
    log_head_tail: bool = False
    insight: bool = True

    def facts(self) -> tuple[str, ...]:
        """Those that can change a prompt."""
        order = self.order
        return (self.unknown_role, self.control_text, f"{order.merge_system} {order.merge_same_role} {order.strict}")


@dataclass(frozen=True, slots=True)
class Assembled:
    """text: where it was asked for. template_version: empty where no template had a part in it. seconds: time spent.

    cached_tokens: ids that came from the cache: all, or those of a beginning. origin: of a chat's prompt.
    """

    ids: TokenIds
    text: str | None
    template_version: str
    seconds: float
    findings: tuple[Finding, ...] = ()
    cached_tokens: int = 0
    dropped_rounds: int = 0
    origin: Origin | None = None
