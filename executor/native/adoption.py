"""When an engine gets native code: before its first step where that is compiled already, else while it serves.

Compiling takes some twenty seconds, more beside a busy engine. Nobody waits for that: torch's own code serves until the
native is there, and the engine changes over between two steps. Whoever asks for it by name does wait, because without
it there is no start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from executor.native import library
from executor.native.operators import NoKernelError
from shared.errors import HermesError, StartupError

log: Final = logging.getLogger(__name__)


class Addition(Protocol):
    """Something native for one engine."""

    name: str
    """As sentences name it."""
    insist: str | None
    """Where there is no start without it: half a sentence that says how to start nevertheless."""

    def source(self) -> library.Source:
        """What to compile. Raises NoKernelError where it does not fit this machine or model."""

    def bring(self, compiled: Path) -> None:
        """Loads and proves it, and hands it to the engine. Called from any thread.

        Raises NoKernelError where it is not what it should be, and HermesError when the engine ended.
        """

    def leave_out(self, reason: NoKernelError) -> None:
        """Says in the log why it is not there."""


class Adoption:
    """Brings what there is to one engine."""

    def __init__(self, additions: Sequence[Addition]) -> None:
        self._additions = additions
        self._stopped = threading.Event()
        self._builder: threading.Thread | None = None

    def begin(self) -> None:
        """Brings what is there, and begins to build what is not.

        Raises StartupError where something is insisted on and cannot be had.
        """
        missing = [each for each in self._additions if not self._is_brought(each)]
        if missing:
            names = " and ".join(each.name for each in missing)
            log.info("building %s beside serving; torch's own code serves until then", names)
            self._builder = threading.Thread(target=self._build_all, args=(missing,), name="native", daemon=True)
            self._builder.start()

    def close(self) -> None:
        """Ends a build that runs, and waits for that."""
        self._stopped.set()
        if self._builder is not None:
            self._builder.join()

    def _is_brought(self, addition: Addition) -> bool:
        """Whether that is settled, one way or the other; if not, it can be built."""
        try:
            if not library.is_there(library.place(addition.source())):
                if addition.insist is None:
                    library.require_tools()
                    return False
                log.info("building the %s; takes half a minute", addition.name)
            obtain(addition, self._stopped)
        except NoKernelError as reason:
            if addition.insist is not None:
                raise StartupError(f"There is no {addition.name}: {reason}; {addition.insist}.") from reason
            addition.leave_out(reason)
        return True

    def _build_all(self, missing: Sequence[Addition]) -> None:
        for addition in missing:
            try:
                obtain(addition, self._stopped)
            except NoKernelError as reason:
                if self._stopped.is_set():
                    return
                addition.leave_out(reason)
            except HermesError:
                log.debug("the engine ended before it got its %s", addition.name)
                return
            except Exception:
                log.exception("building the %s failed; torch's own code serves", addition.name)


def obtain(addition: Addition, stopped: threading.Event) -> None:
    """Builds an addition unless it is there, and brings it. Raises what the two raise."""
    addition.bring(library.built(addition.source(), stopped))
