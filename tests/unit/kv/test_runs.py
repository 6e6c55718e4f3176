import pytest

from executor.kv.runs import FreeRuns, Run


def test_a_returned_block_joins_the_runs_on_both_sides():
    free = FreeRuns(1, 7)
    assert [free.take(1), free.take(2), free.take(3)] == [1, 2, 3]
    free.add(1)
    free.add(3)
    assert free.runs() == [Run(1, 1), Run(3, 5)]
    free.add(2)
    assert free.runs() == [Run(1, 7)]
    assert len(free) == 7


def test_taking_from_the_middle_leaves_a_run_on_each_side():
    free = FreeRuns(1, 7)
    assert free.take(1, 3) == 4
    assert free.runs() == [Run(1, 3), Run(5, 3)]


def test_the_long_run_is_at_least_half_as_long_as_the_longest():
    free = FreeRuns(1, 100)
    free.take(1, 9)
    free.take(11, 19)
    assert free.long_run() == Run(31, 70)


def test_a_block_that_starts_no_run_cannot_be_taken():
    free = FreeRuns(1, 4)
    with pytest.raises(KeyError):
        free.take(2)
    with pytest.raises(KeyError):
        free.take(1, 4)


def test_without_free_blocks_there_is_no_run():
    free = FreeRuns(1, 1)
    free.take(1)
    with pytest.raises(IndexError):
        free.long_run()
