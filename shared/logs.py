"""Logs on stderr, for people or as JSON lines. Prompts and answers never go there, unless that is asked for."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Final, Literal

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["human", "json", "auto"]

_OURS: Final = ("__main__", "assembler", "executor", "hermes", "shared")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_COLOURS: Final = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_PLAIN: Final = "\x1b[0m"
# Of a prompt, from either end.
_SHOWN_CHARACTERS: Final = 80


def configure(level: Level, format: Format, service: str) -> None:  # noqa: A002  the setting's own name
    """Sends this process's logs to stderr, one line each.

    level: least severity of Hermes' own lines; libraries speak from warning on.
    format: auto is human on a terminal, and json elsewhere.
    service: stands in every line.
    """
    terminal = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    if format == "json" or (format == "auto" and not terminal):
        handler.setFormatter(JsonFormatter(service))
    else:
        handler.setFormatter(HumanFormatter(service, colours=_COLOURS if terminal else {}))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)


class HumanFormatter(logging.Formatter):
    """Time, level, service and message; then a traceback where there is one."""

    def __init__(self, service: str, colours: dict[int, str]) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s " + service + " | %(message)s", "%H:%M:%S")
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        colour = self._colours.get(record.levelno)
        line = super().format(record)
        return f"{colour}{line}{_PLAIN}" if colour else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, service, logger, message, and what `extra` brought."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def without_text(error: BaseException) -> str:
    """The tracebacks of an exception and its causes, with types but without messages, which may quote a prompt."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{type(current).__module__}.{type(current).__qualname__}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nraised from\n".join(parts)


def head_tail(text: str) -> str:
    """The first and last characters of a text, on one line."""
    if len(text) <= 2 * _SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:_SHOWN_CHARACTERS]!r} … {text[-_SHOWN_CHARACTERS:]!r}"
