"""A step's plan: which keys each query is given, whatever tree the sequences stand on."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.attention import AttentionCall
from executor.batch import WORTH_SHARING, WORTH_SHARING_NATIVELY, Batch, SharedRun, Work, pack, shared_runs, stretch
from executor.kv.cache import KVCache
from executor.kv.eviction import KVLimits
from executor.kv.node import Scope
from executor.kv.pool import BlockPool, KVLayout
from executor.native.kernel import AttentionKernel
from executor.native.parts import PART_KEYS, PROMPT_PART_KEYS, PROMPT_ROWS, Parts
from executor.requests import Job, Request, Sampling, Stopping
from executor.requests import Sequence as Running

CPU = torch.device("cpu")
SCOPE = Scope("a", "model", "full")
BLOCK = 16
PAYS = WORTH_SHARING // BLOCK
"""Blocks that two sequences must share for it to pay."""


def runs_of(*paths: Sequence[object]) -> set[SharedRun]:
    """Nodes are told apart by identity, so equal strings stand for the same node."""
    return set(shared_runs(dict(enumerate(paths)), BLOCK, WORTH_SHARING))  # type: ignore[arg-type]


def nodes(name: str, count: int) -> list[object]:
    return [_node(name, i) for i in range(count)]


_NODES: dict[tuple[str, int], object] = {}


def _node(name: str, i: int) -> object:
    return _NODES.setdefault((name, i), object())


class TestSharedRuns:
    def test_nothing_is_shared_by_nobody_or_by_one(self) -> None:
        assert runs_of() == set()
        assert runs_of(nodes("a", 4 * PAYS)) == set()
        assert runs_of([], []) == set()

    def test_what_two_share_is_attended_once(self) -> None:
        trunk = nodes("trunk", PAYS)
        assert runs_of(trunk, trunk) == {SharedRun((0, 1), 0, PAYS)}

    def test_it_must_save_enough_keys_for_a_call_more(self) -> None:
        trunk = nodes("trunk", PAYS - 1)
        assert runs_of(trunk, trunk) == set()
        assert runs_of(trunk, trunk, trunk) == {SharedRun((0, 1, 2), 0, PAYS - 1)}

    def test_paths_that_never_meet_share_nothing(self) -> None:
        assert runs_of(nodes("a", 2 * PAYS), nodes("b", 2 * PAYS)) == set()

    def test_a_longer_path_goes_on_alone(self) -> None:
        trunk = nodes("trunk", 2 * PAYS)
        assert runs_of(trunk[:PAYS], trunk) == {SharedRun((0, 1), 0, PAYS)}

    def test_those_that_go_on_together_share_their_own_run(self) -> None:
        trunk = nodes("trunk", 3 * PAYS)
        assert runs_of(trunk[:PAYS], trunk, trunk) == {
            SharedRun((0, 1, 2), 0, PAYS),
            SharedRun((1, 2), PAYS, 3 * PAYS),
        }

    def test_nested_forks_give_a_run_for_each_stretch(self) -> None:
        trunk, left, right = nodes("trunk", PAYS), nodes("left", PAYS), nodes("right", 2 * PAYS)
        assert runs_of(trunk + left, trunk + right, trunk + left, trunk + right, trunk) == {
            SharedRun((0, 1, 2, 3, 4), 0, PAYS),
            SharedRun((0, 2), PAYS, 2 * PAYS),
            SharedRun((1, 3), PAYS, 3 * PAYS),
        }

    def test_a_run_too_short_is_read_with_its_childrens_runs(self) -> None:
        trunk, left, right = nodes("trunk", 2), nodes("left", PAYS), nodes("right", PAYS)
        assert runs_of(trunk + left, trunk + left, trunk + right, trunk + right) == {
            SharedRun((0, 1), 0, 2 + PAYS),
            SharedRun((2, 3), 0, 2 + PAYS),
        }

    def test_a_lone_branch_reads_a_run_too_short_by_itself(self) -> None:
        trunk, left = nodes("trunk", 2), nodes("left", PAYS)
        assert runs_of(trunk + left, trunk + left, trunk + nodes("lone", PAYS)) == {SharedRun((0, 1), 0, 2 + PAYS)}

    def test_one_that_ends_at_once_does_not_keep_the_others_from_sharing(self) -> None:
        trunk = nodes("trunk", PAYS)
        assert runs_of(trunk[:1], trunk, trunk, []) == {SharedRun((1, 2), 0, PAYS)}


class TestStretch:
    @pytest.mark.parametrize(("slots", "expected"), [([7], slice(7, 8)), ([3, 4, 5], slice(3, 6))])
    def test_neighbours_are_read_where_they_lie(self, slots: list[int], expected: slice) -> None:
        assert stretch(np.array(slots), CPU) == expected

    @pytest.mark.parametrize("slots", [[3, 5], [5, 4], [1, 3, 2, 4], [0, 2, 1, 3, 4, 5], [2, 2]])
    def test_anything_else_is_gathered_in_order(self, slots: list[int]) -> None:
        found = stretch(np.array(slots), CPU)
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == slots


class House:
    """A small cache, and sequences on it that compute without a model."""

    def __init__(self, blocks: int = 400, block_size: int = BLOCK) -> None:
        layout = KVLayout(1, 1, 1, torch.float32, CPU)
        self.cache = KVCache(BlockPool(layout, blocks, block_size), KVLimits(min_copy_tokens=1))

    def open(self, prompt: Sequence[int]) -> Running:
        """Admitted, with slots for its prompt."""
        (sequence,) = Job(Request(tuple(prompt), Sampling(), Stopping(), SCOPE), lambda _: None).samples
        blocks = self.cache.open(SCOPE, self.cache.find(SCOPE, prompt, len(prompt) - 1))
        sequence.enter(blocks, blocks.cached_tokens)
        sequence.held.reserve(len(prompt))
        return sequence

    def compute(self, sequence: Running, until: int) -> None:
        sequence.computed = until
        sequence.held.publish(sequence.tokens, until)

    def decoding(self, prompt: Sequence[int]) -> Running:
        """One whose prompt ran, and whose first token is about to."""
        sequence = self.open(prompt)
        self.compute(sequence, len(prompt))
        sequence.extend(prompt[-1])
        sequence.held.reserve(len(sequence.tokens))
        return sequence

    def pack(self, works: Sequence[Work], kernel: AttentionKernel | None = None) -> Batch:
        return pack(works, self.cache.block_size, CPU, torch.float32, kernel)

    def slots(self, sequence: Running, end: int) -> list[int]:
        size = self.cache.block_size
        return [sequence.held.table[p // size] * size + p % size for p in range(end)]


def next_token(sequence: Running) -> Work:
    return Work(sequence, sequence.computed, 1)


def seen(batch: Batch) -> list[Counter[int]]:
    """How often each query is given each slot of the pool."""
    queries = torch.arange(batch.token_ids.shape[1])
    pool = torch.arange(100_000)
    counts: list[Counter[int]] = [Counter() for _ in queries]
    if batch.plan.native is not None:
        for query, slots in reads_of(batch.plan.native.parts):
            counts[query].update(slots)
    for call in [*batch.plan.own, *batch.plan.shared]:
        slots = pool[call.slots].tolist()
        assert slots, "the CPU kernel dies of a call without keys"
        for i, query in enumerate(queries[call.rows].tolist()):
            counts[query].update(slot for j, slot in enumerate(slots) if visible(call, i, j, len(slots)))
    return counts


def reads_of(parts: Parts) -> Iterator[tuple[int, list[int]]]:
    """Which query reads which slots."""
    rows, row_starts, runs, run_starts, reads = (tensor.tolist() for tensor in parts)
    for part in range(len(row_starts) - 1):
        of_part = runs[run_starts[part] : run_starts[part + 1]]
        slots = [slot for first, length in of_part for slot in range(first, first + length)]
        assert 0 < len(slots) <= (PROMPT_PART_KEYS if reads[part] < len(slots) else PART_KEYS)
        for place, row in enumerate(rows[row_starts[part] : row_starts[part + 1]]):
            yield row, slots[: max(0, reads[part] + place)]


def visible(call: AttentionCall, query: int, key: int, keys: int) -> bool:
    if call.causal:
        return key <= query
    if call.mask is not None:
        assert call.mask.shape[1] == keys
        return call.mask[query, key].item() == 0.0
    return True


class NoKernel:
    """Stands for a kernel in plans that nobody carries out."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, parts: Parts, *, scale: float, output: Tensor
    ) -> None:
        raise AssertionError("a plan is only made here")


NO_KERNEL = NoKernel()


def is_right(house: House, works: Sequence[Work], kernel: AttentionKernel | None = None) -> Batch:
    """Packs, and proves every part of the step."""
    batch = house.pack(works, kernel)
    sees, row, last = seen(batch), 0, []
    for work in works:
        slots = house.slots(work.sequence, work.end)
        for position in range(work.start, work.end):
            assert batch.token_ids[0, row] == work.sequence.tokens[position]
            assert batch.positions[0, row] == position
            assert batch.plan.slots[row] == slots[position]
            assert sees[row] == Counter(slots[: position + 1]), "each key up to its own, exactly once"
            row += 1
        last.append(row - 1)
    assert batch.token_ids.shape == batch.positions.shape == (1, row)
    assert batch.plan.slots.shape == (row,)
    assert batch.last_rows.tolist() == last
    assert all(t.dtype == torch.int64 for t in (batch.token_ids, batch.positions, batch.last_rows, batch.plan.slots))
    return batch


class TestPack:
    def test_no_work_is_no_step(self) -> None:
        with pytest.raises(ValueError, match="needs work"):
            pack([], BLOCK, CPU, torch.float32)

    def test_a_whole_prompt_is_one_causal_call_where_its_keys_lie(self) -> None:
        house = House()
        sequence = house.open(range(40))
        batch = is_right(house, [Work(sequence, 0, 40)])
        (call,) = batch.plan.own
        assert call.causal
        assert isinstance(call.slots, slice)

    def test_a_chunk_in_the_middle_is_masked(self) -> None:
        house = House()
        sequence = house.open(range(40))
        house.compute(sequence, 16)
        batch = is_right(house, [Work(sequence, 16, 16)])
        assert batch.plan.own[0].mask is not None
        assert batch.last_rows.tolist() == [15]

    def test_a_hit_in_the_middle_of_a_block_goes_on_from_there(self) -> None:
        house = House()
        house.decoding(range(40))
        sequence = house.open([*range(37), 99, 98])
        assert sequence.computed == 32  # what is in no published block yet is not found
        is_right(house, [Work(sequence, 32, 7)])

    def test_decoding_forks_share_their_prefix_in_one_call(self) -> None:
        house = House()
        prefix = list(range(WORTH_SHARING))
        forks = [house.decoding([*prefix, 1000 + i, 7, 8]) for i in range(5)]
        batch = is_right(house, [next_token(fork) for fork in forks])
        (shared,) = batch.plan.shared
        assert isinstance(shared.rows, torch.Tensor)
        assert shared.rows.tolist() == [0, 1, 2, 3, 4]

    def test_a_prefill_beside_decodes_reads_the_prefix_by_itself(self) -> None:
        house = House()
        prefix = list(range(WORTH_SHARING))
        first, second = house.decoding([*prefix, 1]), house.decoding([*prefix, 2])
        third = house.open([*prefix, 3, 4, 5])
        works = [next_token(first), Work(third, third.computed, 3), next_token(second)]
        (shared,) = is_right(house, works).plan.shared
        assert isinstance(shared.rows, torch.Tensor)
        assert shared.rows.tolist() == [0, 4]

    def test_the_very_same_prompt_is_shared_up_to_its_own_last_block(self) -> None:
        house = House()
        prompt = list(range(WORTH_SHARING))
        works = [next_token(house.decoding(prompt)) for _ in range(3)]
        batch = is_right(house, works)
        assert len(batch.plan.shared) == 1

    def test_a_kernel_is_given_everything_prompts_first(self) -> None:
        house = House()
        prefix = list(range(WORTH_SHARING_NATIVELY))
        first, second = house.decoding([*prefix, 1, 2]), house.decoding([*prefix, 2])
        third = house.open([*prefix, 3, 4, 5])
        works = [next_token(first), Work(third, third.computed, 3), next_token(second)]
        plan = is_right(house, works, NO_KERNEL).plan
        assert not plan.own
        assert not plan.shared
        assert plan.native is not None
        assert plan.native.kernel is NO_KERNEL
        assert plan.native.parts.rows.tolist() == [1, 2, 3, 0, 4, 0, 4]

    def test_a_prompt_is_cut_into_rows_for_a_kernel(self) -> None:
        house = House()
        plan = is_right(house, [Work(house.open(range(40)), 0, 40)], NO_KERNEL).plan
        assert plan.native is not None
        assert plan.native.parts.row_starts.tolist() == [0, 40 - PROMPT_ROWS, 40], (
            "the last rows read most, and go first"
        )
        assert plan.native.parts.reads.tolist() == [PROMPT_ROWS + 1, 1]

    def test_a_prompt_behind_a_long_context_is_cut_for_a_kernel_too(self) -> None:
        house = House()
        prompt = house.open(range(PROMPT_PART_KEYS + 20))
        house.compute(prompt, PROMPT_PART_KEYS - 4)
        plan = is_right(house, [Work(prompt, PROMPT_PART_KEYS - 4, 24)], NO_KERNEL).plan
        assert plan.native is not None
        assert plan.native.parts.reads.tolist() == [PROMPT_PART_KEYS - 3, -3]

    def test_a_long_context_is_cut_for_a_kernel(self) -> None:
        house = House()
        plan = is_right(house, [next_token(house.decoding(range(3 * PART_KEYS - 1)))], NO_KERNEL).plan
        assert plan.native is not None
        assert plan.native.parts.row_starts.tolist() == [0, 1, 2, 3]

    def test_scattered_blocks_are_gathered(self) -> None:
        house = House(blocks=40)
        first, second = house.open(range(8)), house.open(range(100, 108))
        first.tokens += range(60)
        second.tokens += range(60)
        for end in range(16, 68, 16):  # they grow in turns, past each other
            first.held.reserve(end)
            second.held.reserve(end)
        is_right(house, [Work(first, 0, 40), Work(second, 0, 33)])


branches = st.recursive(
    st.just([]),
    lambda children: st.lists(st.tuples(st.integers(1, 40), children), min_size=1, max_size=3),
    max_leaves=8,
)


def prompts_of(tree: object, prefix: list[int]) -> list[list[int]]:
    """The paths from the root to each node of a tree of stretches; siblings differ in their first token."""
    found = [prefix] if prefix else []
    for i, (length, children) in enumerate(tree):  # type: ignore[arg-type, misc]
        token = 10 * len(prefix) + i
        found += prompts_of(children, prefix + [token] * length)
    return found


@settings(max_examples=150, deadline=None)
@given(
    tree=branches.filter(bool),
    block_size=st.sampled_from([1, 4, 16]),
    threshold=st.sampled_from([1, 8, 64]),
    kernel=st.sampled_from([None, NO_KERNEL]),
    choices=st.randoms(use_true_random=False),
)
def test_any_tree_of_sequences_gives_each_query_each_of_its_keys_once(
    tree: object, block_size: int, threshold: int, kernel: AttentionKernel | None, choices: object
) -> None:
    house = House(blocks=3000, block_size=block_size)
    works = []
    for prompt in prompts_of(tree, []):
        for _ in range(choices.randint(1, 2)):  # type: ignore[attr-defined]
            if choices.random() < 0.6:  # type: ignore[attr-defined]
                works.append(next_token(house.decoding(prompt)))
            else:
                sequence = house.open(prompt)
                house.compute(sequence, choices.randint(sequence.computed, len(prompt) - 1))  # type: ignore[attr-defined]
                count = choices.randint(1, sequence.remaining)  # type: ignore[attr-defined]
                works.append(Work(sequence, sequence.computed, count))
    choices.shuffle(works)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.batch.WORTH_SHARING", threshold)
        patch.setattr("executor.batch.WORTH_SHARING_NATIVELY", threshold)
        is_right(house, works, kernel)
