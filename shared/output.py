"""Standard output that cannot be written: its reader has gone, or its disk is full."""

import os
import select
import sys
from contextlib import suppress


def abandon() -> None:
    """Gives up what standard output did not take, so that the end of the process does not try again."""
    with suppress(OSError, ValueError):  # it may be closed, or no file at all
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, which else shows only when it is written."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
