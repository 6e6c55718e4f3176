"""A file in which processes that share a cache tell each other what was flushed."""

import os
from pathlib import Path
from typing import Final, NamedTuple

# A line for everything; else a line is a namespace's tag.
_ALL: Final = "all"
# A longer file makes way for a new one, which those who look again take for a flush of everything.
_MOST_BYTES: Final = 2**20


class _Seen(NamedTuple):
    """Which file it was, and how much of it."""

    inode: int
    bytes: int


class Notices:
    """One process's view of the file. Its methods block for as long as the disk takes, and may raise OSError."""

    def __init__(self, file: Path) -> None:
        """Raises nothing; what cannot be seen now is seen later."""
        self._file = file
        try:
            self._seen = self._look()
        except OSError:
            self._seen = _Seen(0, 0)

    def post(self, tag: str | None) -> None:
        """Tells the others that a namespace was flushed, or everything."""
        line = f"{_ALL if tag is None else tag}\n"
        if self._look().bytes < _MOST_BYTES:
            with self._file.open("a") as file:
                file.write(line)
            return
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text(line)
        draft.replace(self._file)

    def news(self) -> list[str | None]:
        """What was flushed since the last look: tags, None for everything."""
        now, seen = self._look(), self._seen
        if now == seen:
            return []
        if seen.inode not in (0, now.inode) or now.bytes < seen.bytes:
            self._seen = now
            return [None]
        with self._file.open() as file:
            file.seek(seen.bytes)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._seen = _Seen(now.inode, seen.bytes + len(whole))
        return [None if line == _ALL else line for line in whole.splitlines()]

    def _look(self) -> _Seen:
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return _Seen(0, 0)
        return _Seen(stat.st_ino, stat.st_size)
