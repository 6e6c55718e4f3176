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


class Run(NamedTuple):
    """Neighbouring slots of the pool."""

    first: int
    length: int

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.length)


class Stretch(NamedTuple):
    """Keys that some of the step's queries read, all of them alike."""

    rows: Sequence[int]
    runs: Sequence[Run]


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


def cut(stretches: Iterable[Stretch]) -> Parts:
    """Cuts stretches into parts of at most PART_KEYS keys, in the order in which they come."""
    rows: list[int] = []
    row_starts = [0]
    runs: list[Run] = []
    run_starts = [0]
    for stretch in stretches:
        for part in _pieces(stretch.runs):
            rows += stretch.rows
            row_starts.append(len(rows))
            runs += part
            run_starts.append(len(runs))
    tensor = torch.tensor
    return Parts(
        tensor(rows, dtype=torch.int64),
        tensor(row_starts, dtype=torch.int64),
        tensor(runs, dtype=torch.int64).reshape(-1, 2),
        tensor(run_starts, dtype=torch.int64),
    )


def _pieces(runs: Sequence[Run]) -> Iterator[list[Run]]:
    piece: list[Run] = []
    room = PART_KEYS
    for first, length in runs:
        taken = 0
        while taken < length:
            now = min(length - taken, room)
            piece.append(Run(first + taken, now))
            taken += now
            room -= now
            if room == 0:
                yield piece
                piece, room = [], PART_KEYS
    if piece:
        yield piece
