"""How long a template takes, learned as it renders, so that what will take long is done beside the event loop."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

# Seconds a character: what quick templates take.
_USUAL: Final = 2e-8
# A message costs about as much as so many characters.
_CHARACTERS_PER_MESSAGE: Final = 256
# What a render takes however short it is, which tells nothing of longer ones.
_SHORTEST_SECONDS: Final = 2e-4
# Of the last render against all before it.
_WEIGHT: Final = 0.25


class Pace:
    """The pace of one template. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._per_character = _USUAL

    def seconds(self, characters: int, messages: int) -> float:
        """How long a conversation will take, by what others took."""
        return self._per_character * (characters + _CHARACTERS_PER_MESSAGE * messages)

    def timed(self, characters: int, messages: int, render: Callable[[], T]) -> T:
        """Renders, and learns from how long that takes the processor."""
        began = time.thread_time()
        try:
            return render()
        finally:
            seconds = max(time.thread_time() - began - _SHORTEST_SECONDS, 0.0)
            pace = seconds / (characters + _CHARACTERS_PER_MESSAGE * messages + 1)
            self._per_character += _WEIGHT * (max(pace, _USUAL) - self._per_character)
