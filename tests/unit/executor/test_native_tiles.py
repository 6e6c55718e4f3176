"""Products on AMX tiles against double precision, and linears that change over to them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import linears
from executor.linears import Crossing, PackedLinear
from executor.model import GenerationDefaults, Model
from executor.native.operators import NoKernelError
from executor.native.tiles import Tiles, prove
from executor.tiling import Tiling
from tests.unit.executor.test_forward import logits
from tests.unit.executor.threads import threads

packs = pytest.mark.skipif(not linears.available(), reason="this CPU has no linears with packed weights")


def weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)).half().float()


def off(product: Tensor, expected: Tensor) -> float:
    """How far a product is from one in double precision, as a share of its norm."""
    return float((product - expected).norm() / expected.norm())


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (32, 32), (48, 96), (960, 576), (176, 1536), (64, 9024)])
@pytest.mark.parametrize("rows", [1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 64, 200, 401])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_as_exact_as_single_precision(
    native_tiles: Tiles, outputs: int, inputs: int, rows: int, *, bias: bool
) -> None:
    torch.manual_seed(rows)
    given, added = torch.randn(rows, inputs), torch.randn(outputs) if bias else None
    dense = weight(outputs, inputs)
    expected = torch.nn.functional.linear(given.double(), dense.double(), None if added is None else added.double())
    product = native_tiles.multiply(given, native_tiles.pack(dense), added)
    in_single = torch.nn.functional.linear(given, dense, added)
    assert off(product, expected) < max(5e-7, 2 * off(in_single, expected))


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6, 1e20])
def test_inputs_of_any_size_keep_their_precision(native_tiles: Tiles, scale: float) -> None:
    given, dense = torch.randn(20, 64) * scale, weight(32, 64)
    assert off(native_tiles.multiply(given, native_tiles.pack(dense), None), given.double() @ dense.double().T) < 5e-7


def test_weights_at_the_ends_of_half_precision_are_exact(native_tiles: Tiles) -> None:
    ends = torch.tensor([65504.0, -65504.0, 2.0**-24, 2.0**-14, 1.0 + 2.0**-10, 0.0, -0.0, 1023 * 2.0**-24])
    dense = torch.zeros(16, 32)
    dense.diagonal()[: len(ends)] = ends
    product = native_tiles.multiply(torch.eye(32), native_tiles.pack(dense), None)
    assert torch.equal(product, dense.T)


def test_a_row_comes_out_the_same_wherever_it_stands(native_tiles: Tiles) -> None:
    packed, given = native_tiles.pack(weight(80, 576)), torch.randn(100, 576)
    together = native_tiles.multiply(given, packed, None)
    for rows in (1, 7, 16, 17, 50):
        assert torch.equal(native_tiles.multiply(given[:rows], packed, None), together[:rows])
        assert torch.equal(native_tiles.multiply(given[-rows:], packed, None), together[-rows:])


def test_results_do_not_depend_on_the_number_of_threads(native_tiles: Tiles) -> None:
    packed, given = native_tiles.pack(weight(960, 576)), torch.randn(70, 576)
    wanted = native_tiles.multiply(given, packed, None)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(native_tiles.multiply(given, packed, None), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(native_tiles: Tiles, value: float) -> None:
    given = torch.randn(20, 64)
    given[7, 3] = value
    product = native_tiles.multiply(given, native_tiles.pack(weight(32, 64)), None)
    assert not bool(product[7].isfinite().any())
    assert bool(product[:7].isfinite().all())
    assert bool(product[8:].isfinite().all())


def test_leading_dimensions_stay_and_rows_may_lie_apart(native_tiles: Tiles) -> None:
    packed, given = native_tiles.pack(weight(48, 64)), torch.randn(3, 5, 128)[..., :64]
    product = native_tiles.multiply(given, packed, None)
    assert product.shape == (3, 5, 48)
    assert torch.equal(product, native_tiles.multiply(given.contiguous(), packed, None))


@pytest.mark.parametrize(
    "call",
    [
        lambda tiles: tiles.pack(torch.zeros(17, 32)),
        lambda tiles: tiles.pack(torch.zeros(16, 33)),
        lambda tiles: tiles.pack(torch.zeros(16, 32, dtype=torch.float16)),
        lambda tiles: tiles.pack(torch.zeros(0, 32)),
        lambda tiles: tiles.multiply(torch.zeros(2, 64), tiles.pack(torch.zeros(16, 32)), None),
        lambda tiles: tiles.multiply(torch.zeros(2, 32).double(), tiles.pack(torch.zeros(16, 32)), None),
        lambda tiles: tiles.multiply(torch.zeros(2, 32), torch.zeros(1, 1, 2, 512), None),
        lambda tiles: tiles.multiply(torch.zeros(2, 32), tiles.pack(torch.zeros(16, 32)), torch.zeros(8)),
        lambda tiles: tiles.multiply(torch.zeros(0, 32), tiles.pack(torch.zeros(16, 32)), None),
    ],
)
def test_what_does_not_fit_is_refused_and_never_read(native_tiles: Tiles, call: Callable[[Tiles], object]) -> None:
    with pytest.raises(RuntimeError, match=r"must be float32|fit"):
        call(native_tiles)


class TestProof:
    """What each start asks for."""

    def test_it_holds(self, native_tiles: Tiles) -> None:
        prove(native_tiles)

    @pytest.mark.parametrize("factor", [1 + 5e-6, float("nan")])
    def test_products_that_are_off_are_found(self, native_tiles: Tiles, factor: float) -> None:
        class Off:
            pack = staticmethod(native_tiles.pack)

            def multiply(self, *given: Any) -> Tensor:
                return native_tiles.multiply(*given) * factor

        with pytest.raises(NoKernelError, match=r"its products of 1 rows differ by"):
            prove(Off())  # type: ignore[arg-type]

    def test_a_part_that_is_left_out_is_found(self, native_tiles: Tiles) -> None:
        class Coarse:
            def pack(self, dense: Tensor) -> Tensor:
                return native_tiles.pack(dense.bfloat16().float())

            multiply = staticmethod(native_tiles.multiply)

        with pytest.raises(NoKernelError):
            prove(Coarse())  # type: ignore[arg-type]


class TestTiling:
    """A model whose linears change over."""

    @pytest.fixture
    def model(self, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
        monkeypatch.setattr(linears, "find_crossing", lambda _: Crossing(8, 2.0))
        monkeypatch.setattr(linears, "crossing_of", lambda *_: Crossing(4, 2.0))

        def make(family: str, **config: Any) -> Model:
            return Model(build(family, **config), GenerationDefaults(), frozenset(), "auto")

        return make

    @pytest.fixture
    def ids(self) -> list[int]:
        return torch.randint(0, 64, (60,), generator=torch.Generator().manual_seed(3)).tolist()

    @packs
    @pytest.mark.parametrize(
        ("family", "config"),
        [
            ("llama", {"tie_word_embeddings": True}),
            ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
            ("qwen2", {"intermediate_size": 64}),
            ("qwen3", {"head_dim": 16}),
            ("gpt_neox", {}),
        ],
    )
    def test_the_logits_stay_as_they_were(
        self, native_tiles: Tiles, model: Callable[..., Model], ids: list[int], family: str, config: Any
    ) -> None:
        made = model(family, **config)
        before = logits(made, ids, [60])
        tiling = Tiling.of(made.module, native_tiles)
        tiling.apply(made.network)
        for steps in ([60], [1] * 60, [8] * 7 + [4], [5, 40, 8, 7]):
            torch.testing.assert_close(logits(made, ids, steps), before, atol=5e-5, rtol=0)

    @packs
    def test_those_that_fit_take_tiles_and_their_dense_weights_go(
        self, native_tiles: Tiles, model: Callable[..., Model]
    ) -> None:
        made = model("llama", tie_word_embeddings=True)
        Tiling.of(made.module, native_tiles).apply(made.network)
        layer = made.module.layers[0]  # type: ignore[index]
        assert layer.qkv.most_rows == layer.gate_up.most_rows == 4
        assert layer.qkv.weight.numel() == layer.gate_up.weight.numel() == 0
        assert layer.down.most_rows == 8, "48 inputs fit no tiles"
        assert layer.down.weight.numel() == 32 * 48
        own = made.network.model.layers[0]
        assert own.self_attn.q_proj.weight.numel() == own.mlp.up_proj.weight.numel() == 0

    @packs
    def test_an_embedding_that_is_tied_to_the_head_stays(
        self, native_tiles: Tiles, model: Callable[..., Model], ids: list[int]
    ) -> None:
        made = model("llama", tie_word_embeddings=True)
        before = made.network.model.embed_tokens.weight.clone()
        Tiling.of(made.module, native_tiles).apply(made.network)
        assert torch.equal(made.network.model.embed_tokens.weight, before)
        assert made.network.lm_head.weight is made.network.model.embed_tokens.weight

    @packs
    def test_up_to_the_limit_it_is_packed_weights_still(
        self, native_tiles: Tiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dense = nn.Linear(64, 32)
        linears.round_weights(nn.Sequential(dense))
        network = nn.Sequential(copy.deepcopy(dense))
        linears.pack(network, 8)
        monkeypatch.setattr(linears, "crossing_of", lambda *_: Crossing(3, 2.0))
        Tiling.of(network, native_tiles).apply(network)
        (packed,) = network
        assert isinstance(packed, PackedLinear)
        used: list[int] = []
        multiply = linears._multiply
        monkeypatch.setattr(
            linears, "_multiply", lambda rows, weights: used.append(len(rows)) or multiply(rows, weights)
        )
        for rows in (1, 3, 4, 30):
            given = torch.randn(rows, 64)
            torch.testing.assert_close(packed(given), dense(given), atol=5e-5, rtol=0)
        assert used == [1, 3]

    def test_it_is_timed_on_the_products_that_serve(self, native_tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
        timed: list[Any] = []
        monkeypatch.setattr(linears, "crossing_of", lambda *given: timed.append(given) or Crossing(1, 1.0))
        network = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32))
        linears.round_weights(network)
        linears.pack(network, 8)
        Tiling.of(network, native_tiles)
        ((widths, few, many),) = timed
        assert widths == [64, 64]
        for width, one, other in zip(widths, few, many, strict=True):
            given = torch.randn(5, width)
            torch.testing.assert_close(one(given), other(given), atol=5e-5, rtol=0)
