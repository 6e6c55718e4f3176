"""The free blocks, kept as runs of neighbours, so that a sequence's blocks can follow each other in memory."""

from typing import NamedTuple


class Run(NamedTuple):
    """Free blocks `start`, `start + 1`, … `start + length - 1`, with no free block on either side."""

    start: int
    length: int


class FreeRuns:
    """A set of free blocks that knows its runs. Every operation is O(1).

    Runs are found from both ends, so that a returned block joins its neighbours, and by size class (the bit length
    of their length), so that a long run is at hand without a search.
    """

    __slots__ = ("_by_class", "_count", "_length_at", "_start_before")

    def __init__(self, first: int, count: int) -> None:
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # the block just behind a run -> where the run starts
        self._by_class: list[dict[int, None]] = [{} for _ in range(count.bit_length() + 1)]
        self._count = count
        if count:
            self._link(Run(first, count))

    def __len__(self) -> int:
        return self._count

    def starts_at(self, block: int) -> bool:
        """Whether a run begins with this block."""
        return block in self._length_at

    def long_run(self) -> Run:
        """A run at least half as long as the longest. Raises IndexError when no block is free."""
        for starts in reversed(self._by_class):
            if starts:
                start = next(iter(starts))
                return Run(start, self._length_at[start])
        raise IndexError("no free block")

    def take(self, start: int, offset: int = 0) -> int:
        """Takes block `start + offset` out of the run that begins at `start`. Raises KeyError for no such run."""
        length = self._length_at[start]
        if not 0 <= offset < length:
            raise KeyError(start + offset)
        self._unlink(Run(start, length))
        if offset:
            self._link(Run(start, offset))
        if offset + 1 < length:
            self._link(Run(start + offset + 1, length - offset - 1))
        self._count -= 1
        return start + offset

    def add(self, block: int) -> None:
        """Returns a block, joining it with the runs on both sides. The caller knows that it is not in here."""
        start, length = block, 1
        if (before := self._start_before.get(block)) is not None:
            length += self._length_at[before]
            self._unlink(Run(before, block - before))
            start = before
        if (behind := self._length_at.get(block + 1)) is not None:
            self._unlink(Run(block + 1, behind))
            length += behind
        self._link(Run(start, length))
        self._count += 1

    def runs(self) -> list[Run]:
        """All runs by start. O(runs log runs); for checks."""
        return [Run(start, length) for start, length in sorted(self._length_at.items())]

    def _link(self, run: Run) -> None:
        self._length_at[run.start] = run.length
        self._start_before[run.start + run.length] = run.start
        self._by_class[run.length.bit_length()][run.start] = None

    def _unlink(self, run: Run) -> None:
        del self._length_at[run.start]
        del self._start_before[run.start + run.length]
        del self._by_class[run.length.bit_length()][run.start]
