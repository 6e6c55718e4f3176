"""How a step's work is cut for the kernel."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.native.parts import PART_KEYS, Run, Stretch, cut, runs_of


@pytest.mark.parametrize(
    ("table", "start", "end", "expected"),
    [
        ([3], 0, 1, [(12, 1)]),
        ([3, 4, 5], 0, 12, [(12, 12)]),
        ([3, 4, 5], 2, 11, [(14, 9)]),
        ([3, 4, 9], 0, 10, [(12, 8), (36, 2)]),
        ([9, 8], 1, 7, [(37, 3), (32, 3)]),
        ([1, 7, 8, 2], 4, 16, [(28, 8), (8, 4)]),
    ],
)
def test_blocks_that_lie_side_by_side_are_one_run(table, start, end, expected):
    assert runs_of(np.array(table), start, end, 4) == [Run(*run) for run in expected]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5), st.data())
def test_runs_are_the_slots_of_the_positions_in_order(table, size, data):
    end = data.draw(st.integers(1, len(table) * size))
    start = data.draw(st.integers(0, end - 1))
    slots = [table[p // size] * size + p % size for p in range(start, end)]
    assert [slot for run in runs_of(np.array(table), start, end, size) for slot in run.slots] == slots


@given(st.lists(st.integers(1, 3 * PART_KEYS), min_size=1, max_size=6))
def test_a_stretch_is_cut_into_full_parts_and_a_rest(lengths):
    runs = [Run(1000 * i, length) for i, length in enumerate(lengths)]
    parts = cut([Stretch([4, 7], runs)])
    starts = parts.run_starts.tolist()
    pieces = [[Run(*run) for run in parts.runs[a:b].tolist()] for a, b in itertools.pairwise(starts)]
    sizes = [sum(run.length for run in piece) for piece in pieces]
    assert sizes[:-1] == [PART_KEYS] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= PART_KEYS
    assert [s for piece in pieces for run in piece for s in run.slots] == [s for run in runs for s in run.slots]
    assert parts.rows.tolist() == [4, 7] * len(pieces)
    assert parts.row_starts.tolist() == list(range(0, 2 * len(pieces) + 1, 2))
