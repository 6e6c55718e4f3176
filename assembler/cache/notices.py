"""A file in which processes that share a cache tell each other what was flushed."""

from pathlib import Path
from typing import Final

# A line for everything; else a line is a namespace's tag.
_ALL: Final = "all"
# A longer file is begun anew, which those who look again take for a flush of everything.
_MOST_BYTES: Final = 2**20


class Notices:
    """One process's view of the file. Its methods block for as long as the disk takes, and may raise OSError."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = self._size()

    def post(self, tag: str | None) -> None:
        """Tells the others that a namespace was flushed, or everything."""
        begun_anew = self._size() > _MOST_BYTES
        with self._file.open("w" if begun_anew else "a") as file:
            file.write(f"{_ALL if tag is None else tag}\n")

    def news(self) -> list[str | None]:
        """What was flushed since the last look: tags, None for everything."""
        size = self._size()
        if size == self._seen:
            return []
        if size < self._seen:  # begun anew, or removed
            self._seen = size
            return [None]
        with self._file.open() as file:
            file.seek(self._seen)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._seen += len(whole)
        return [None if line == _ALL else line for line in whole.splitlines()]

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0
