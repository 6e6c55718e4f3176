"""A step's attention against the softmax as a textbook writes it, one query and one head at a time."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from executor import attention
from executor.attention import (
    AttentionCall,
    AttentionPlan,
    StepCache,
    UnsupportedModelError,
    _attention_function,
    attend_step,
    running,
)

HEAD_DIM = 16
SLOTS = 96
SCALE = 0.3
TIGHT = {"rtol": 1e-5, "atol": 2e-6}
LOOSE = {"rtol": 4e-2, "atol": 4e-2}

Kernel = Callable[[AttentionCall, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


@pytest.fixture(params=["_attend_cpu", "_attend_anywhere"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Every test runs on both kernels: the CPU's own, and the one that other devices take."""
    chosen: Kernel = getattr(attention, request.param)
    monkeypatch.setattr(attention, "_attend_cpu", chosen)
    return chosen


@pytest.fixture(params=[(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def heads(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


class Step:
    """Random queries, keys and values, and which keys each query may see."""

    def __init__(self, heads: tuple[int, int], visible: list[list[int]], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(len(visible))
        query_heads, kv_heads = heads
        self.visible = visible
        self.query = torch.randn(query_heads, len(visible), HEAD_DIM, generator=generator).to(dtype) * 2
        self.keys = torch.randn(SLOTS, kv_heads, HEAD_DIM, generator=generator).to(dtype) * 2
        self.values = torch.randn(SLOTS, kv_heads, HEAD_DIM, generator=generator).to(dtype)

    def expected(self) -> Tensor:
        """`[T, heads, head_dim]` in float64."""
        query, keys, values = self.query.double(), self.keys.double(), self.values.double()
        group = query.shape[0] // keys.shape[1]
        output = torch.empty(query.shape[1], query.shape[0], HEAD_DIM, dtype=torch.float64)
        for row, head in itertools.product(range(query.shape[1]), range(query.shape[0])):
            seen = self.visible[row]
            scores = torch.stack([query[head, row] @ keys[slot, head // group] for slot in seen]) * SCALE
            output[row, head] = scores.softmax(0) @ values[seen, head // group]
        return output

    def run(self, own: list[AttentionCall], shared: list[AttentionCall] | None = None) -> Tensor:
        plan = AttentionPlan(torch.arange(len(self.visible)), own, shared or [])
        return attend_step(plan, self.query, self.keys, self.values, SCALE)

    def holds(
        self, own: list[AttentionCall], shared: list[AttentionCall] | None = None, tolerance: dict[str, float] = TIGHT
    ) -> None:
        output = self.run(own, shared)
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.double(), self.expected(), **tolerance)


def going_on(start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count, start + count), float("-inf"), dtype=dtype).triu_(start + 1)


def index(slots: list[int]) -> Tensor:
    return torch.tensor(slots)


SCATTERED = [40, 41, 7, 8, 90, 3, 55]


def test_a_decode_step_sees_all_its_keys_where_they_lie(heads: tuple[int, int]) -> None:
    Step(heads, [list(range(10, 33))]).holds([AttentionCall(slice(0, 1), slice(10, 33))])


def test_a_decode_step_sees_one_key(heads: tuple[int, int]) -> None:
    Step(heads, [[95]]).holds([AttentionCall(slice(0, 1), slice(95, 96))])


def test_scattered_keys_are_gathered(heads: tuple[int, int]) -> None:
    Step(heads, [SCATTERED]).holds([AttentionCall(slice(0, 1), index(SCATTERED))])


def test_a_first_chunk_is_causal(heads: tuple[int, int]) -> None:
    step = Step(heads, [list(range(20, 20 + row + 1)) for row in range(9)])
    step.holds([AttentionCall(slice(0, 9), slice(20, 29), causal=True)])


def test_a_first_chunk_over_scattered_keys_is_causal(heads: tuple[int, int]) -> None:
    step = Step(heads, [SCATTERED[: row + 1] for row in range(len(SCATTERED))])
    step.holds([AttentionCall(slice(0, len(SCATTERED)), index(SCATTERED), causal=True)])


@pytest.mark.parametrize(("start", "count"), [(1, 2), (5, 12), (40, 3)])
def test_a_chunk_that_goes_on_sees_what_came_before(heads: tuple[int, int], start: int, count: int) -> None:
    step = Step(heads, [list(range(8, 8 + start + row + 1)) for row in range(count)])
    step.holds([AttentionCall(slice(0, count), slice(8, 8 + start + count), mask=going_on(start, count))])


def test_a_mixed_step_keeps_its_sequences_apart(heads: tuple[int, int]) -> None:
    visible = [
        list(range(30)),
        *[list(range(50, 50 + row + 1)) for row in range(4)],
        SCATTERED,
        *[list(range(60, 60 + 6 + row + 1)) for row in range(3)],
    ]
    Step(heads, visible).holds(
        [
            AttentionCall(slice(0, 1), slice(0, 30)),
            AttentionCall(slice(1, 5), slice(50, 54), causal=True),
            AttentionCall(slice(5, 6), index(SCATTERED)),
            AttentionCall(slice(6, 9), slice(60, 69), mask=going_on(6, 3)),
        ]
    )


def test_runs_that_several_share_are_joined_with_what_is_their_own(heads: tuple[int, int]) -> None:
    trunk, branch, other = list(range(16)), list(range(32, 40)), [70, 71, 64, 65]
    own = [[80], [81, 82], [83, 84, 85], [86], [90, 91]]
    paths = [trunk + branch, trunk + branch, trunk + other, trunk + other, []]
    Step(heads, [path + mine for path, mine in zip(paths, own, strict=True)]).holds(
        [AttentionCall(slice(row, row + 1), index(mine)) for row, mine in enumerate(own)],
        [
            AttentionCall(index([0, 1, 2, 3]), slice(0, 16)),
            AttentionCall(index([2, 3]), index(other)),
            AttentionCall(index([0, 1]), slice(32, 40)),
        ],
    )


def test_rows_that_share_nothing_are_exactly_as_they_are_alone(heads: tuple[int, int]) -> None:
    step = Step(heads, [list(range(9)), list(range(9)), list(range(40, 50))])
    own = [AttentionCall(slice(row, row + 1), keys) for row, keys in enumerate([slice(8, 9), slice(8, 9)])]
    lone = AttentionCall(slice(2, 3), slice(40, 50))
    joined = step.run([*own, lone], [AttentionCall(index([0, 1]), slice(0, 8))])
    alone = step.run([*own, lone])
    assert torch.equal(joined[2], alone[2])


def test_joining_holds_where_one_part_outweighs_the_other_by_far(heads: tuple[int, int]) -> None:
    step = Step(heads, [list(range(12)), list(range(12))])
    step.keys[3] *= 60
    step.holds(
        [AttentionCall(slice(row, row + 1), slice(8, 12)) for row in range(2)],
        [AttentionCall(index([0, 1]), slice(0, 8))],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_its_digits(heads: tuple[int, int], dtype: torch.dtype) -> None:
    visible = [list(range(30)), *[list(range(50, 50 + 6 + row + 1)) for row in range(3)], list(range(16)) + SCATTERED]
    Step(heads, visible, dtype).holds(
        [
            AttentionCall(slice(0, 1), slice(16, 30)),
            AttentionCall(slice(1, 4), slice(50, 59), mask=going_on(6, 3, dtype)),
            AttentionCall(slice(4, 5), index(SCATTERED)),
        ],
        [AttentionCall(index([0, 4]), slice(0, 16))],
        tolerance=LOOSE,
    )


def test_what_the_pool_holds_elsewhere_does_not_matter(heads: tuple[int, int]) -> None:
    step = Step(heads, [list(range(10, 20))])
    calls = [AttentionCall(slice(0, 1), slice(10, 20))]
    before = step.run(calls)
    for pool in (step.keys, step.values):
        pool[:10] = float("nan")
        pool[20:] = float("nan")
    assert torch.equal(step.run(calls), before)


def test_an_update_writes_each_token_to_its_slot_and_hands_out_the_whole_pool() -> None:
    pools = [[torch.zeros(8, 2, 4) for _ in range(2)] for _ in range(2)]
    cache = StepCache(pools[0], pools[1], AttentionPlan(index([6, 1]), []))
    key, value = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4)
    keys, values = cache.update(key, value, 1)
    assert keys is pools[0][1]
    assert values is pools[1][1]
    assert torch.equal(keys[6], key[0, :, 0])
    assert torch.equal(values[1], value[0, :, 1])
    assert keys[[0, 2, 3, 4, 5, 7]].count_nonzero() == 0
    assert pools[0][0].count_nonzero() == 0


class TestAttentionFunction:
    """What a layer may ask of it."""

    query = torch.randn(1, 2, 1, 4)
    pool = torch.randn(3, 2, 4)
    cache = StepCache((), (), AttentionPlan(index([0]), [AttentionCall(slice(0, 1), slice(0, 3))]))

    def call(self, module: object = None, **options: object) -> Tensor:
        with running(self.cache):
            output, _ = _attention_function(module or SimpleNamespace(), self.query, self.pool, self.pool, **options)  # type: ignore[arg-type]
        return output

    def test_the_scale_is_the_layers_own_or_the_usual_one(self) -> None:
        assert torch.equal(self.call(scaling=0.5), self.call())
        assert not torch.equal(self.call(scaling=1.0), self.call())

    def test_options_that_change_nothing_are_taken(self) -> None:
        self.call(dropout=0.0, sliding_window=None, softcap=None, is_causal=True, position_ids=index([0]))

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"sliding_window": 16}, "a sliding attention window"),
            ({"softcap": 50.0}, "a soft cap"),
            ({"s_aux": torch.zeros(2)}, "attention sinks"),
            ({"position_bias": torch.zeros(2)}, "a position bias"),
            ({"indices": torch.zeros(2)}, "sparse attention"),
            ({"attention_mask": torch.zeros(1, 1, 1, 3)}, "an attention mask of its own"),
            ({"is_causal": False}, "attention in both directions"),
        ],
    )
    def test_what_is_not_done_here_is_refused_by_name(self, options: dict[str, object], what: str) -> None:
        with pytest.raises(UnsupportedModelError, match=what):
            self.call(**options)

    def test_a_layer_that_looks_both_ways_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="in both directions"):
            self.call(SimpleNamespace(is_causal=False))

    def test_keys_that_did_not_come_from_the_cache_are_refused(self) -> None:
        with running(self.cache), pytest.raises(UnsupportedModelError, match="other than those that its cache"):
            _attention_function(SimpleNamespace(), self.query, self.query, self.query)  # type: ignore[arg-type]

    def test_it_belongs_to_a_step(self) -> None:
        with pytest.raises(RuntimeError, match="outside a step"):
            _attention_function(SimpleNamespace(), self.query, self.pool, self.pool)  # type: ignore[arg-type]
