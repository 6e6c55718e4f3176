"""One step as tensors: the packed tokens of all its sequences, and the plan by which their attention is carried out.

The plan cuts each sequence's keys into stretches. A run of tree nodes on which several decoding sequences stand is
attended once, with all their queries; what is a sequence's own is a stretch more. Where there is a kernel, it takes all
of them in one call. Else each is a call, and one whose blocks lie side by side in the pool is read where it lies, any
other is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor.attention import AttentionCall, AttentionPlan
from executor.native.kernel import AttentionKernel, KernelCall
from executor.native.parts import Stretch, cut, prompt_stretches, runs_of
from executor.requests import Sequence

if TYPE_CHECKING:
    from executor.kv.node import Node

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]

WORTH_SHARING: Final = 256
"""A run is attended once for all when that saves reading this many keys: a call and a join cost about as much."""
WORTH_SHARING_NATIVELY: Final = 64
"""The same where a kernel takes all parts in one call: two sequences with a run of 64 keys take as long either way."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence does in a step: its tokens from `start` on, `count` of them."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the last token that runs."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the last of all its tokens runs, so that the next one can be chosen."""
        return self.end == len(self.sequence.tokens)


class Batch(NamedTuple):
    """One step, ready for the model."""

    token_ids: Tensor
    """`[1, T]` int64."""
    positions: Tensor
    """`[1, T]` int64: each token's place in its own sequence."""
    last_rows: Tensor
    """`[works]` int64: the row of T that each work ends with, whose logits are wanted."""
    plan: AttentionPlan


class SharedRun(NamedTuple):
    """Blocks `[first, last)` of the paths of several works, the same nodes in each."""

    works: tuple[int, ...]
    first: int
    last: int


def pack(
    works: Rows[Work],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kernel: AttentionKernel | None = None,
) -> Batch:
    """Lays the works out one behind the other and plans their attention.

    kernel: what attends all of them in one call for a layer; else there are several.
    """
    if not works:
        raise ValueError("a step needs work")
    tables = [np.asarray(work.sequence.held.table, dtype=np.int64) for work in works]
    ends = np.cumsum([work.count for work in works])
    token_ids = np.concatenate([np.asarray(w.sequence.tokens[w.start : w.end], dtype=np.int64) for w in works])
    positions = np.concatenate([np.arange(w.start, w.end, dtype=np.int64) for w in works])
    slots = np.concatenate([_slots(table, w.start, w.end, block_size) for w, table in zip(works, tables, strict=True)])

    decodes = {i: work.sequence.held.path for i, work in enumerate(works) if work.count == 1}
    runs = list(shared_runs(decodes, block_size, WORTH_SHARING if kernel is None else WORTH_SHARING_NATIVELY))
    covered = [0] * len(works)  # keys of each work that shared runs read; those of one work come in order, without gaps
    for run in runs:
        for i in run.works:
            covered[i] = run.last * block_size

    def rows(work: int) -> slice:
        return slice(int(ends[work]) - works[work].count, int(ends[work]))

    def keys(work: int, start: int, end: int) -> slice | Tensor:
        return stretch(_slots(tables[work], start, end, block_size), device)

    def read(readers: Rows[int], start: int, end: int) -> Stretch:
        return Stretch([int(ends[i]) - 1 for i in readers], runs_of(tables[readers[0]], start, end, block_size))

    own: list[AttentionCall] = []
    shared: list[AttentionCall] = []
    native: KernelCall | None = None
    if kernel is None:
        own += [
            _chunk(work, rows(i), keys(i, 0, work.end), device, dtype) for i, work in enumerate(works) if work.count > 1
        ]
        own += [AttentionCall(rows(i), keys(i, covered[i], works[i].end)) for i in decodes]
        shared += [
            AttentionCall(
                rows=torch.from_numpy(ends[list(run.works)] - 1).to(device),
                slots=keys(run.works[0], run.first * block_size, run.last * block_size),
            )
            for run in runs
        ]
    else:
        prompts = (
            prompt_stretches(tables[i], rows(i).start, work.start, work.end, block_size)
            for i, work in enumerate(works)
            if work.count > 1
        )
        once = [read(run.works, run.first * block_size, run.last * block_size) for run in runs]
        alone = [read([i], covered[i], works[i].end) for i in decodes]
        # About the largest first, so that no thread is left with one.
        native = KernelCall(kernel, cut([*chain.from_iterable(prompts), *once, *alone]))
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device)[None],
        positions=torch.from_numpy(positions).to(device)[None],
        last_rows=torch.from_numpy(ends - 1).to(device),
        plan=AttentionPlan(torch.from_numpy(slots).to(device), own, shared, native),
    )


def shared_runs(paths: Mapping[int, Rows[Node]], block_size: int, worth: int) -> Iterator[SharedRun]:
    """Finds the runs of nodes that are worth attending once, walking down the tree from the groups that part in it.

    `paths` are the tree nodes that each work's sequence stands on, root first. The runs of one work never overlap, and
    come in order without gaps. A run is worth it that saves reading `worth` keys.
    """
    groups = [(list(paths), 0)] if paths else []
    while groups:
        members, first = groups.pop()
        last = _parting([paths[i] for i in members], first)
        pays = (last - first) * block_size * (len(members) - 1) >= worth
        if pays:
            yield SharedRun(tuple(members), first, last)
        parted: defaultdict[int, list[int]] = defaultdict(list)
        for i in members:
            if last < len(paths[i]):
                parted[id(paths[i][last])].append(i)
        groups += [(group, last if pays else first) for group in parted.values() if len(group) > 1]


def _parting(paths: Rows[Rows[Node]], first: int) -> int:
    """Where paths that agree up to `first` part, or the first of them ends."""
    one, shortest = paths[0], min(map(len, paths))
    last = first
    while last < shortest and all(path[last] is one[last] for path in paths):
        last += 1
    return last


def stretch(slots: Slots, device: torch.device) -> slice | Tensor:
    """The keys at `slots`: a slice where they lie side by side, else an index to gather by."""
    if slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


def _chunk(work: Work, rows: slice, keys: slice | Tensor, device: torch.device, dtype: torch.dtype) -> AttentionCall:
    """A chunk's queries against all keys of its sequence: each of them up to its own."""
    if work.start == 0:
        return AttentionCall(rows, keys, causal=True)
    # The kernels' own causal mask starts at the top left, which is wrong for a chunk that goes on.
    mask = torch.full((work.count, work.end), float("-inf"), dtype=dtype, device=device).triu_(work.start + 1)
    return AttentionCall(rows, keys, mask=mask)


def _slots(table: Slots, start: int, end: int, block_size: int) -> Slots:
    """The pool rows of positions `[start, end)`."""
    positions = np.arange(start, end, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size
