"""Linears with packed weights: the same products whatever the number of rows, and only where that can be."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from executor import linears
from executor.linears import PackedLinear

packs = pytest.mark.skipif(not linears.available(), reason="this CPU has no linears with packed weights")


def rounded(inner: int, outer: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(inner, outer, bias=bias)
    linears.round_weights(nn.Sequential(linear))
    return linear


class Tied(nn.Module):
    """An embedding and a head over one weight, and what is no linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 24)
        self.inner = nn.ModuleList([nn.Linear(24, 24), nn.LayerNorm(24)])
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight


class Scaled(nn.Linear):
    """A linear that does something of its own."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * 2


@packs
@torch.inference_mode()
@pytest.mark.parametrize(("inner", "outer"), [(24, 40), (576, 192), (1536, 576), (7, 3), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 100])
def test_packed_and_dense_products_differ_by_the_order_of_summation(
    inner: int, outer: int, rows: int, *, bias: bool
) -> None:
    dense = rounded(inner, outer, bias=bias)
    given = torch.randn(rows, inner)
    torch.testing.assert_close(PackedLinear(dense, rows)(given), dense(given), atol=5e-5, rtol=0)


@packs
@torch.inference_mode()
def test_weights_are_packed_up_to_the_limit_and_dense_above(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    multiply = linears._multiply
    monkeypatch.setattr(linears, "_multiply", lambda rows, packed: used.append(len(rows)) or multiply(rows, packed))
    packed = PackedLinear(rounded(24, 40), 8)
    given = torch.randn(20, 24)
    for rows in (1, 8, 9, 20):
        packed(given[:rows])
    assert used == [1, 8]


@packs
@torch.inference_mode()
def test_a_row_comes_out_alike_alone_and_among_many() -> None:
    packed = PackedLinear(rounded(576, 192), 8)
    given = torch.randn(30, 576)
    alone = torch.cat([packed(given[i : i + 1]) for i in range(30)])
    torch.testing.assert_close(alone, packed(given), atol=5e-5, rtol=0)


@packs
@torch.inference_mode()
def test_leading_dimensions_stay_and_all_of_them_count_as_rows() -> None:
    packed = PackedLinear(rounded(24, 40), 6)
    assert packed(torch.randn(2, 3, 24)).shape == (2, 3, 40)
    assert packed(torch.randn(2, 4, 24)).shape == (2, 4, 40)


@packs
def test_every_plain_linear_is_packed_and_nothing_else() -> None:
    network = nn.Sequential(Tied(), Scaled(24, 24))
    linears.round_weights(network)
    linears.pack(network, 8)
    tied = network[0]
    assert [type(part) for part in (tied.inner[0], tied.head)] == [PackedLinear] * 2
    assert [type(part) for part in (tied.embedding, tied.inner[1], network[1])] == [nn.Embedding, nn.LayerNorm, Scaled]
    assert tied.head.weight is tied.embedding.weight, "there is a third copy"


@packs
def test_a_linear_that_stands_in_two_places_is_packed_once() -> None:
    one = rounded(24, 24)
    network = nn.Sequential(nn.Sequential(one), nn.Sequential(one))
    linears.pack(network, 8)
    assert network[0][0] is network[1][0]
    assert isinstance(network[0][0], PackedLinear)


def test_weights_are_rounded_in_place_and_a_tied_embedding_with_them() -> None:
    network = Tied()
    bias, weight = network.inner[0].bias.clone(), network.head.weight
    exact = weight.detach().clone()
    linears.round_weights(network)
    assert network.head.weight is network.embedding.weight is weight
    assert torch.equal(weight, exact.half().float())
    assert not torch.equal(weight, exact)
    assert torch.equal(network.inner[0].bias, bias)


class TestLostInHalf:
    """What half precision cannot hold."""

    @pytest.mark.parametrize("value", [7e4, -7e4, 1e30, math.inf, -math.inf, math.nan])
    def test_a_value_out_of_range_is_found(self, value: float) -> None:
        network = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
        network[1].weight.data[3, 5] = value
        assert linears.lost_in_half(network) == "1.weight"

    def test_weights_too_small_to_keep_are_found(self) -> None:
        network = nn.Sequential(nn.Linear(24, 40))
        network[0].weight.data.mul_(1e-5)
        assert linears.lost_in_half(network) == "0.weight"

    def test_one_output_too_small_to_keep_is_found(self) -> None:
        network = nn.Sequential(nn.Linear(24, 40))
        network[0].weight.data.div_(100)
        network[0].weight.data[7] /= 200
        assert linears.lost_in_half(network) == "0.weight"

    def test_it_looks_at_every_row_of_a_large_weight(self) -> None:
        network = nn.Sequential(nn.Linear(2, linears._CHUNK_ROWS + 2))
        network[0].weight.data[-1, -1] = 1e6
        assert linears.lost_in_half(network) == "0.weight"

    def test_a_tied_weight_is_told_by_its_name(self) -> None:
        network = Tied()
        network.head.weight.data[0, 0] = 1e6
        assert linears.lost_in_half(network) == "embedding.weight"

    def test_usual_weights_with_rows_of_nothing_are_kept(self) -> None:
        network = nn.Sequential(nn.Linear(576, 192))
        network[0].weight.data[5] = 0
        network[0].weight.data[6] = 1e-12  # of a token that no text had
        assert linears.lost_in_half(network) is None

    def test_weights_that_are_no_linears_do_not_count(self) -> None:
        network = nn.Sequential(nn.Embedding(4, 4), Scaled(4, 4))
        for parameter in network.parameters():
            parameter.data.fill_(1e6)
        assert linears.lost_in_half(network) is None


class TestAvailable:
    """Whether this machine has them."""

    def test_a_cpu_without_them_is_told_from_their_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: nn.Linear) -> None:
            raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16 NoQEngine")

        monkeypatch.setattr(linears, "_pack", fails)
        assert not linears.available()

    def test_products_that_are_wrong_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linears, "_pack", lambda linear: linear)
        monkeypatch.setattr(linears, "_multiply", lambda rows, packed: packed(rows) * 1.001)
        assert not linears.available()


class TestFindCrossing:
    """Where packed linears stop being faster, by a clock of the test's own."""

    @pytest.fixture
    def gains(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """How many times faster packed linears are at each row count that is tried."""
        monkeypatch.setattr(linears, "_pack", lambda linear: linear)
        monkeypatch.setattr(linears, "_multiply", lambda rows, packed: packed(rows))
        gains: list[float] = []

        def clock() -> Iterator[float]:
            for tried in itertools.count():
                for disturbed in (5.0, 1.0, 3.0):  # the fastest counts
                    yield gains[tried] * disturbed
                    yield disturbed

        ticks = clock()
        seconds = linears._seconds
        monkeypatch.setattr(linears, "_seconds", lambda *given: seconds(*given) * 0 + next(ticks))
        return gains

    NETWORK = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    @pytest.mark.parametrize(
        ("given", "most_rows", "speedup"),
        [
            ([2.0, 3.0, 1.5, 0.9, 0.8], linears._LADDER[2], 3.0),
            ([2.0, 0.9, 1.5, 0.9, 1.1, 0.9, 0.9], linears._LADDER[4], 2.0),
            ([0.9, 2.0, 0.9, 0.9], linears._LADDER[1], 2.0),
            ([0.9, 0.9], 0, 1.0),
            ([2.0] * len(linears._LADDER), linears._LADDER[-1], 2.0),
        ],
    )
    def test_it_is_the_last_row_count_won_before_two_lost(
        self, gains: list[float], given: list[float], most_rows: int, speedup: float
    ) -> None:
        gains += given
        found = linears.find_crossing(self.NETWORK)
        assert found.most_rows == most_rows
        assert found.speedup == pytest.approx(speedup)

    def test_it_leaves_the_number_of_threads_as_it_was(
        self, gains: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gains += [2.0, 0.9, 0.9]
        seen: list[int] = []
        multiply = linears._multiply
        monkeypatch.setattr(
            linears, "_multiply", lambda *given: seen.append(torch.get_num_threads()) or multiply(*given)
        )
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            linears.find_crossing(self.NETWORK)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
        assert set(seen) == {1}

    def test_asked_for_they_serve_few_rows_even_where_they_win_nowhere(self) -> None:
        assert linears.asked_for(linears.Crossing(0, 1.0)).most_rows == linears._FEWEST_ROWS
        assert linears.asked_for(linears.Crossing(64, 2.0)) == (64, 2.0)

    def test_the_sample_is_of_a_bounded_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linears, "_SAMPLE_WEIGHTS", 100)
        parts = [nn.Linear(8, 8) for _ in range(5)]
        assert linears.sample_of(parts) == parts[:2]

    def test_the_sample_is_of_layers_and_not_of_a_head(self) -> None:
        head, parts = nn.Linear(8, 100), [nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 4)]
        assert linears.sample_of([head, *parts]) == parts
        assert linears.sample_of([head]) == [head]
