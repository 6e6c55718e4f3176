"""The native kernel against the softmax as a textbook writes it, in float64; and the proof that each start asks for."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from executor.kv.pool import KVLayout
from executor.native.kernel import NativeKernel, prove, require_fit
from executor.native.operators import NoKernelError
from executor.native.parts import Parts, Run, Stretch, cut, prompt_stretches
from tests.unit.executor.threads import threads

TIGHT = {"rtol": 1e-5, "atol": 5e-6}
SLOTS = 1200


class Step:
    """Random queries, keys and values; slots that nobody reads hold no numbers."""

    def __init__(self, heads: tuple[int, int], head_dim: int, stretches: list[Stretch], tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens + head_dim)
        query_heads, kv_heads = heads
        self.stretches = stretches
        self.scale = head_dim**-0.5
        self.query = torch.randn(query_heads, tokens, head_dim, generator=generator) * 2
        self.keys = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
        self.values = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
        beside = torch.ones(SLOTS, dtype=torch.bool)
        for stretch in stretches:
            for run in stretch.runs:
                beside[list(run.slots)] = False
        self.keys[beside] = self.values[beside] = float("nan")

    def expected(self, row: int) -> Tensor:
        """`[heads, head_dim]` in float64."""
        seen = [slot for each in self.stretches if row in each.rows for slot in each.read_by(row)]
        query, keys, values = self.query[:, row].double(), self.keys[seen].double(), self.values[seen].double()
        group = len(query) // keys.shape[1]
        return torch.stack(
            [(keys[:, h // group] @ q * self.scale).softmax(0) @ values[:, h // group] for h, q in enumerate(query)]
        )

    def run(self, kernel: NativeKernel, parts: Parts | None = None) -> Tensor:
        output = torch.full((self.query.shape[1], self.query.shape[0], self.query.shape[2]), -7.0)
        parts = cut(self.stretches) if parts is None else parts
        kernel.attend(self.query, self.keys, self.values, parts, scale=self.scale, output=output)
        return output

    def holds(self, kernel: NativeKernel) -> None:
        output = self.run(kernel).double()
        for row in range(len(output)):
            if any(row in each.rows for each in self.stretches):
                torch.testing.assert_close(output[row], self.expected(row), **TIGHT)
            else:
                assert bool((output[row] == -7.0).all()), "another's row"


def alone(*lengths: int, apart: int = 3) -> list[Stretch]:
    """Sequences that lie one behind the other, with slots between them that are none of theirs."""
    starts = itertools.accumulate([length + apart for length in lengths], initial=0)
    return [
        Stretch([row], [Run(start, length)]) for row, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (9, 3), (4, 1), (14, 2), (16, 2), (32, 2), (17, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_sequences_of_any_length_and_heads_of_any_shape(
    native_kernel: NativeKernel, heads: tuple[int, int], head_dim: int
) -> None:
    Step(heads, head_dim, alone(1, 2, 15, 16, 17, 63, 64, 65, 130, 257, 513), 11).holds(native_kernel)


@pytest.mark.parametrize("head_dim", [32, 48, 96, 112, 256])
def test_heads_of_other_widths(native_kernel: NativeKernel, head_dim: int) -> None:
    Step((6, 2), head_dim, alone(1, 40, 300), 3).holds(native_kernel)


@pytest.mark.parametrize("size", [1, 5, 16, 31])
def test_keys_that_lie_scattered_in_blocks(native_kernel: NativeKernel, size: int) -> None:
    places = (torch.randperm(SLOTS // size, generator=torch.Generator().manual_seed(size)) * size).tolist()
    first = Stretch([0], [Run(place, size) for place in places[: 520 // size]])
    second = Stretch([1], [Run(place, max(size - 1, 1)) for place in places[520 // size : 800 // size]])
    Step((9, 3), 64, [first, second], 2).holds(native_kernel)


@pytest.mark.parametrize("sharing", range(1, 14))
def test_a_run_that_any_number_of_sequences_share(native_kernel: NativeKernel, sharing: int) -> None:
    own = [Stretch([row], [Run(700 + 20 * row, 1 + row)]) for row in range(sharing)]
    Step((6, 2), 64, [Stretch(range(sharing), [Run(5, 333)]), *own], sharing).holds(native_kernel)


def test_nested_runs_beside_one_that_shares_nothing(native_kernel: NativeKernel) -> None:
    stretches = [
        Stretch([0, 1, 3, 4], [Run(0, 80), Run(200, 40)]),
        Stretch([0, 3], [Run(300, 64)]),
        Stretch([1, 4], [Run(400, 17)]),
        *(Stretch([row], [Run(500 + 100 * row, 10 * row + 1)]) for row in (0, 1, 2, 3, 4)),
    ]
    Step((6, 2), 64, stretches, 6).holds(native_kernel)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 31, 32, 33, 70])
@pytest.mark.parametrize("before", [0, 1, 15, 64, 300, 1000])
def test_the_rows_of_a_prompt_read_what_is_before_them(native_kernel: NativeKernel, before: int, rows: int) -> None:
    table = torch.randperm(SLOTS // 16, generator=torch.Generator().manual_seed(rows)).numpy()
    stretches = list(prompt_stretches(table, 1, before, before + rows, 16))
    Step((9, 3), 64, stretches, rows + 2).holds(native_kernel)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 16), ((14, 2), 64), ((32, 2), 128), ((6, 2), 80)])
def test_prompts_and_decoding_sequences_side_by_side(
    native_kernel: NativeKernel, heads: tuple[int, int], head_dim: int
) -> None:
    table = torch.arange(SLOTS // 16).numpy()
    stretches = [
        *prompt_stretches(table[:40], 0, 500, 600, 16),
        *prompt_stretches(table[40:50], 100, 0, 140, 16),
        Stretch([240, 241], [Run(0, 300)]),
        Stretch([240], [Run(820, 40)]),
        Stretch([241], [Run(900, 1)]),
    ]
    Step(heads, head_dim, stretches, 242).holds(native_kernel)


def test_rows_that_read_a_part_or_nothing_of_a_stretch(native_kernel: NativeKernel) -> None:
    stretches = [Stretch(range(6), [Run(0, 100)]), Stretch(range(6), [Run(200, 3), Run(300, 4)], -2)]
    Step((6, 2), 64, stretches, 6).holds(native_kernel)


def test_joining_holds_where_one_part_outweighs_the_other_by_far(native_kernel: NativeKernel) -> None:
    step = Step(
        (6, 2), 64, [Stretch([0, 1], [Run(0, 300)]), Stretch([0], [Run(400, 9)]), Stretch([1], [Run(500, 9)])], 2
    )
    step.keys[250] *= 60
    step.holds(native_kernel)


def test_a_query_as_a_layer_hands_it_over(native_kernel: NativeKernel) -> None:
    step = Step((6, 2), 64, alone(40, 70, 1), 3)
    wanted = step.run(native_kernel)
    for seen in (step.query.transpose(0, 1).contiguous().transpose(0, 1), step.query.mT.contiguous().mT):
        step.query = seen
        assert torch.equal(step.run(native_kernel), wanted)


def test_results_depend_neither_on_threads_nor_on_neighbours(native_kernel: NativeKernel) -> None:
    step = Step((9, 3), 64, alone(300, 7, 600, 40), 4)
    wanted = step.run(native_kernel)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(step.run(native_kernel), wanted)
    for row in range(4):
        assert torch.equal(step.run(native_kernel, cut([step.stretches[row]]))[row], wanted[row])


def test_results_of_a_prompt_depend_neither_on_threads_nor_on_where_its_blocks_lie(native_kernel: NativeKernel) -> None:
    straight = torch.arange(40)
    scattered = torch.randperm(SLOTS // 16, generator=torch.Generator().manual_seed(1))[:40]
    step = Step((9, 3), 64, list(prompt_stretches(straight.numpy(), 0, 500, 640, 16)), 140)
    wanted = step.run(native_kernel)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(step.run(native_kernel), wanted)
    for pool in (step.keys, step.values):
        pool.view(-1, 16, 3, 64)[scattered] = pool.view(-1, 16, 3, 64)[straight]
    assert torch.equal(step.run(native_kernel, cut(prompt_stretches(scattered.numpy(), 0, 500, 640, 16))), wanted)


@pytest.mark.parametrize("place", [0, 70, 127, 128, 139])
def test_a_key_of_a_prompt_that_is_no_number_spoils_the_rows_from_its_own_on(
    native_kernel: NativeKernel, place: int
) -> None:
    step = Step((6, 2), 64, list(prompt_stretches(torch.arange(SLOTS // 16).numpy(), 0, 0, 140, 16)), 140)
    step.keys[place, 1, 5] = float("nan")
    output = step.run(native_kernel)
    assert bool(output[place:, 3:].isnan().all())
    assert bool(output[:place].isfinite().all())
    assert bool(output[:, :3].isfinite().all())


@pytest.mark.parametrize("slot", [0, 130, 299])
def test_a_key_that_is_no_number_spoils_its_own_readers_alone(native_kernel: NativeKernel, slot: int) -> None:
    step = Step((6, 2), 64, alone(300, 40), 2)
    step.keys[slot, 1, 5] = float("nan")
    output = step.run(native_kernel)
    assert bool(output[0, 3:].isnan().all())
    assert bool(output[0, :3].isfinite().all())
    assert bool(output[1].isfinite().all())


def test_nothing_to_attend_is_nothing_done(native_kernel: NativeKernel) -> None:
    Step((6, 2), 64, [], 3).holds(native_kernel)


class TestWhatIsNotItsWork:
    """It reads and writes memory by numbers, so it checks them."""

    @pytest.mark.parametrize("run", [(SLOTS - 5, 6), (-1, 3), (4, 0), (4, -2), (2**62, 2**62)])
    def test_runs_outside_the_pool(self, native_kernel: NativeKernel, run: tuple[int, int]) -> None:
        parts = cut(alone(40))._replace(runs=torch.tensor([run]))
        with pytest.raises(RuntimeError, match="a run outside the pool"):
            Step((6, 2), 64, alone(40), 1).run(native_kernel, parts)

    @pytest.mark.parametrize("row", [-1, 3])
    def test_rows_that_the_step_does_not_have(self, native_kernel: NativeKernel, row: int) -> None:
        parts = cut(alone(40))._replace(rows=torch.tensor([row]))
        with pytest.raises(RuntimeError, match="a row that is none"):
            Step((6, 2), 64, alone(40), 3).run(native_kernel, parts)

    @pytest.mark.parametrize("reads", [SLOTS + 1, -SLOTS - 1, 2**63 - 1, -(2**63)])
    def test_more_keys_than_there_are(self, native_kernel: NativeKernel, reads: int) -> None:
        parts = cut(alone(40))._replace(reads=torch.tensor([reads]))
        with pytest.raises(RuntimeError, match="no number of keys"):
            Step((6, 2), 64, alone(40), 1).run(native_kernel, parts)

    @pytest.mark.parametrize("name", ["row_starts", "run_starts"])
    @pytest.mark.parametrize("starts", [[], [0], [0, 5], [1, 0], [-1, 1], [0, 0, 1]])
    def test_parts_that_do_not_fit_together(self, native_kernel: NativeKernel, name: str, starts: list[int]) -> None:
        parts = cut(alone(40))._replace(**{name: torch.tensor(starts, dtype=torch.int64)})
        with pytest.raises(RuntimeError, match="starts"):
            Step((6, 2), 64, alone(40), 3).run(native_kernel, parts)

    def test_other_dtypes(self, native_kernel: NativeKernel) -> None:
        step = Step((6, 2), 64, alone(40), 1)
        step.keys = step.keys.bfloat16()
        with pytest.raises(RuntimeError, match="float32"):
            step.run(native_kernel)

    def test_other_shapes(self, native_kernel: NativeKernel) -> None:
        step = Step((6, 2), 64, alone(40), 1)
        step.query = step.query[..., :32].contiguous()
        with pytest.raises(RuntimeError, match="shapes"):
            step.run(native_kernel)


class Wrong:
    """The kernel with one thing about it that is wrong."""

    def __init__(self, kernel: NativeKernel, what: str) -> None:
        self.kernel = kernel
        self.what = what

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, parts: Parts, *, scale: float, output: Tensor
    ) -> None:
        match self.what:
            case "scale":
                scale *= 1.001
            case "a key too few":
                shorter = parts.runs.clone()
                shorter[:, 1] -= (shorter[:, 1] == shorter[:, 1].max()).long()
                parts = parts._replace(runs=shorter)
            case "the wrong head":
                query = query.roll(1, 0)
        self.kernel.attend(query, keys, values, parts, scale=scale, output=output)
        if self.what == "nothing written":
            output[-1] = 0.0


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_proof_holds_for_the_kernel(native_kernel: NativeKernel, head_dim: int) -> None:
    prove(native_kernel, head_dim)


@pytest.mark.parametrize("what", ["scale", "a key too few", "the wrong head", "nothing written"])
def test_the_proof_sees_what_is_wrong(native_kernel: NativeKernel, what: str) -> None:
    with pytest.raises(NoKernelError, match="its results differ from torch's by "):
        prove(Wrong(native_kernel, what), 64)


def layouts() -> Iterator[tuple[KVLayout, str]]:
    cpu = torch.device("cpu")
    yield KVLayout(2, 3, 64, torch.float32, torch.device("meta")), "the model runs on meta"
    yield KVLayout(2, 3, 64, torch.bfloat16, cpu), "the pool holds bfloat16"
    yield KVLayout(2, 3, 72, torch.float32, cpu), "a multiple of 16, and the model's is 72"


@pytest.mark.parametrize(("layout", "why"), list(layouts()))
def test_pools_that_it_does_not_read(layout: KVLayout, why: str) -> None:
    with pytest.raises(NoKernelError, match=why):
        require_fit(layout)
