"""What the supervisor's commands print."""

import sys
from typing import Final

_COLOURS: Final = {"assembler": "\x1b[36m", "executor": "\x1b[35m"}
_NO_COLOUR: Final = "\x1b[0m"


def say(line: str) -> None:
    """A line on standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """A line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def say_log_line(prefixed: str) -> None:
    """A line of a service's log, its prefix coloured on a terminal."""
    name, bar, line = prefixed.partition(" | ")
    colour = _COLOURS.get(name.strip())
    say(f"{colour}{name}{bar}{_NO_COLOUR}{line}" if colour and sys.stdout.isatty() else prefixed)
