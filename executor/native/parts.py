"""The work of one kernel call, as parts: rows of the step's queries, and the runs of neighbouring slots they read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]

PART_KEYS: Final = 256
"""Keys of a part at most: few enough for a lone sequence to keep several threads busy, and a multiple of what the
kernel reads at once. Not chosen by the number of threads or sequences, so that results depend on neither."""
PROMPT_PART_KEYS: Final = 1024
"""The same where a part has many rows, whose results take longer to write and to join."""
PROMPT_ROWS: Final = 32
"""Rows of a prompt in a part: so many that keys are read once for many, so few that several threads have work."""


class Run(NamedTuple):
    """Neighbouring slots of the pool."""

    first: int
    length: int

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.length)


class Stretch(NamedTuple):
    """Keys that some of the step's queries read."""

    rows: Sequence[int]
    runs: Sequence[Run]
    reads: int | None = None
    """How many of the keys the first row reads; each row behind it reads one more. None: all of them read all."""

    def read_by(self, row: int) -> list[int]:
        """The slots that one of the rows reads, in order."""
        slots = [slot for run in self.runs for slot in run.slots]
        return slots if self.reads is None else slots[: max(0, self.reads + self.rows.index(row))]


class Parts(NamedTuple):
    """A step's stretches, cut. All int64 on the CPU."""

    rows: Tensor
    """The parts' rows, one part behind the other."""
    row_starts: Tensor
    """Where each part's rows begin, and where the last one's end: `[parts + 1]`."""
    runs: Tensor
    """`[runs, 2]`: first slot and number of slots, one part behind the other."""
    run_starts: Tensor
    """As `row_starts`."""
    reads: Tensor
    """`[parts]`: how many of a part's keys its first row reads, below zero where a later row is the first that reads
    any; each row reads one more than the last, up to all."""


def runs_of(table: Blocks, start: int, end: int, block_size: int) -> list[Run]:
    """The slots of positions `[start, end)` of a sequence with this block table, in order."""
    first = start // block_size
    blocks = table[first : -(-end // block_size)]
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    found: list[Run] = []
    position = start
    for at in (*breaks.tolist(), len(blocks)):
        stop = min((first + at) * block_size, end)
        found.append(Run(int(table[position // block_size]) * block_size + position % block_size, stop - position))
        position = stop
    return found


def prompt_stretches(table: Blocks, first_row: int, start: int, end: int, block_size: int) -> Iterator[Stretch]:
    """What the rows from `first_row` on read: positions `[start, end)` of a sequence with this block table."""
    for position in reversed(range(start, end, PROMPT_ROWS)):
        last = min(position + PROMPT_ROWS, end)
        rows = range(first_row + position - start, first_row + last - start)
        yield Stretch(rows, runs_of(table, 0, last, block_size), position + 1)


def cut(stretches: Iterable[Stretch]) -> Parts:
    """Cuts stretches into parts, in the order in which they come."""
    rows: list[int] = []
    row_starts = [0]
    runs: list[Run] = []
    run_starts = [0]
    reads: list[int] = []
    for stretch in stretches:
        before = 0
        for part in _pieces(stretch.runs, PART_KEYS if stretch.reads is None else PROMPT_PART_KEYS):
            keys = sum(run.length for run in part)
            rows += stretch.rows
            row_starts.append(len(rows))
            runs += part
            run_starts.append(len(runs))
            reads.append(keys if stretch.reads is None else min(keys, stretch.reads - before))
            before += keys
    tensor = torch.tensor
    return Parts(
        tensor(rows, dtype=torch.int64),
        tensor(row_starts, dtype=torch.int64),
        tensor(runs, dtype=torch.int64).reshape(-1, 2),
        tensor(run_starts, dtype=torch.int64),
        tensor(reads, dtype=torch.int64),
    )


def _pieces(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    piece: list[Run] = []
    room = most
    for first, length in runs:
        taken = 0
        while taken < length:
            now = min(length - taken, room)
            piece.append(Run(first + taken, now))
            taken += now
            room -= now
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
