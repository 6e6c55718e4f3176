"""Which forward serves: lean where it holds, packed where that is wanted and safe, else transformers' own."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import forward, lean, linears
from executor.attention import AttentionCall, AttentionPlan, UnsupportedModelError
from executor.batch import Batch
from executor.lean import LeanNetwork
from executor.linears import Crossing, PackedLinear
from executor.model import GenerationDefaults, Model
from executor.probe import Probe, discover_layout

Build = Callable[..., Any]

packs = pytest.mark.skipif(not linears.available(), reason="this CPU has no linears with packed weights")

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LIKE_LLAMA = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": YARN, "head_dim": 16}),
    ("llama", {"hidden_act": "gelu", "num_key_value_heads": 4}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
]
UNLIKE = [
    ("gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}),
    ("phi3", {"sliding_window": None}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("stablelm", {}),
]


def made(network: Any, cpu_linear: Any = "dense") -> Model:
    return Model(network, GenerationDefaults(), frozenset(), cpu_linear)


@torch.inference_mode()
def logits(model: Model, ids: list[int], steps: list[int]) -> torch.Tensor:
    """Of each token of a prompt that is read in steps of so many tokens."""
    layout, parts, start = model.layout, [], 0
    shape = (len(ids), layout.kv_heads, layout.head_dim)
    keys, values = ([torch.zeros(shape) for _ in range(layout.layers)] for _ in range(2))
    for count in steps:
        end = start + count
        mask = torch.full((count, end), float("-inf")).triu_(start + 1)
        places = torch.arange(start, end)
        plan = AttentionPlan(places, [AttentionCall(slice(None), slice(0, end), mask=mask)])
        batch = Batch(torch.tensor([ids[start:end]]), places[None], torch.arange(count), plan)
        parts.append(model.forward(batch, keys, values))
        start = end
    return torch.cat(parts)


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(0, 64, (60,), generator=torch.Generator().manual_seed(3)).tolist()


class TestLean:
    """The forward that is written after Llama's."""

    @pytest.mark.parametrize(("family", "config"), LIKE_LLAMA)
    def test_its_logits_are_transformers_own(self, build: Build, family: str, config: Any) -> None:
        network = build(family, **config)
        for parameter in network.parameters():  # norms of ones and biases of zeros would hide what is left out
            parameter.data.add_(torch.randn(parameter.shape) * 0.1)
        network.set_attn_implementation("hermes")
        probe = Probe(network, discover_layout(network))
        assert LeanNetwork.knows(network)
        assert probe.off(LeanNetwork(network)) < 1e-5
        assert probe.off(forward._own_run(network)) < 1e-5, "the network it was made from is no longer itself"

    @pytest.mark.parametrize(("family", "config"), LIKE_LLAMA)
    def test_it_serves(self, build: Build, family: str, config: Any) -> None:
        assert isinstance(made(build(family, **config))._run, LeanNetwork)

    @pytest.mark.parametrize(("family", "config"), UNLIKE)
    def test_other_families_keep_their_own(self, build: Build, family: str, config: Any) -> None:
        assert not isinstance(made(build(family, **config))._run, LeanNetwork)

    def test_a_class_of_somebody_elses_is_not_known(self, build: Build) -> None:
        network = build("llama")
        network.__class__ = type("LlamaForCausalLM", (type(network),), {})
        assert not LeanNetwork.knows(network)

    @pytest.mark.parametrize(
        "change",
        [
            lambda network: network.add_module("more", torch.nn.Linear(2, 2)),
            lambda network: network.model.add_module("more", torch.nn.Linear(2, 2)),
            lambda network: network.model.layers[1].add_module("more", torch.nn.Linear(2, 2)),
            lambda network: network.model.layers[1].self_attn.add_module("q_norm", torch.nn.LayerNorm(8)),
            lambda network: network.model.layers[1].mlp.add_module("up_proj", torch.nn.Bilinear(2, 2, 2)),
            lambda network: setattr(
                network.model.layers[1].self_attn.k_proj, "bias", torch.nn.Parameter(torch.ones(16))
            ),
        ],
    )
    def test_a_network_with_other_parts_is_not_known(self, build: Build, change: Callable[[Any], None]) -> None:
        network = build("llama")
        change(network)
        assert not LeanNetwork.knows(network)

    def test_joined_weights_are_held_once(self, build: Build) -> None:
        network = build("qwen2")
        layer = LeanNetwork(network).layers[0]
        attention, mlp = network.model.layers[0].self_attn, network.model.layers[0].mlp
        for whole, parts in (
            (layer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.gate_up, (mlp.gate_proj, mlp.up_proj)),
        ):
            storage = whole.weight.untyped_storage().data_ptr()
            assert [part.weight.untyped_storage().data_ptr() for part in parts] == [storage] * len(parts)

    def test_one_that_is_off_is_left_out_with_a_warning(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        norm = lean._Norm.forward
        monkeypatch.setattr(lean._Norm, "forward", lambda self, rows: norm(self, rows) * 1.01)
        assert not isinstance(made(build("llama"))._run, LeanNetwork)
        assert "without a lean forward, whose logits differ" in caplog.text

    def test_one_that_does_not_run_is_left_out_with_a_warning(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(lean._Norm, "forward", lambda self, rows: rows[:0])
        assert not isinstance(made(build("llama"))._run, LeanNetwork)
        assert "without a lean forward: its code does not run" in caplog.text

    def test_half_precision_keeps_transformers_own(self, build: Build) -> None:
        assert not isinstance(made(build("llama").to(torch.bfloat16))._run, LeanNetwork)


class TestPacked:
    """Linears with packed weights, in a whole model."""

    @pytest.fixture
    def crossing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linears, "find_crossing", lambda _: Crossing(8, 2.0))

    @packs
    @pytest.mark.usefixtures("crossing")
    @pytest.mark.parametrize(("family", "config"), [*LIKE_LLAMA, *UNLIKE])
    def test_the_number_of_rows_in_a_step_does_not_change_the_logits(
        self, build: Build, ids: list[int], family: str, config: Any
    ) -> None:
        model = made(build(family, **config), "auto")
        assert (model.packed_rows, model.cpu_linear) == (8, "fp16")
        at_once = logits(model, ids, [60])
        for steps in ([1] * 60, [8] * 7 + [4], [40, *[1] * 20], [5, 40, 8, 7]):
            torch.testing.assert_close(logits(model, ids, steps), at_once, atol=5e-5, rtol=0)

    @packs
    @pytest.mark.usefixtures("crossing")
    @pytest.mark.parametrize(("family", "config"), [LIKE_LLAMA[0], ("gpt_neox", {})])
    def test_they_give_the_logits_of_the_rounded_weights(
        self, build: Build, ids: list[int], family: str, config: Any
    ) -> None:
        network = build(family, **config)
        exact, rounded = made(copy.deepcopy(network)), copy.deepcopy(network)
        linears.round_weights(rounded)
        packed = logits(made(network, "auto"), ids, [4] * 15)
        torch.testing.assert_close(packed, logits(made(rounded), ids, [60]), atol=5e-5, rtol=0)
        assert not torch.allclose(packed, logits(exact, ids, [60]), atol=5e-5, rtol=0), "nothing was rounded"

    @packs
    @pytest.mark.usefixtures("crossing")
    def test_all_linears_are_packed(self, build: Build) -> None:
        model = made(build("llama", tie_word_embeddings=True), "fp16")
        parts = [type(module) for module in model._run.modules()]  # type: ignore[attr-defined]
        assert parts.count(PackedLinear) == 4 * 2 + 1
        assert parts.count(torch.nn.Linear) == 0
        assert model._run.head.weight is model._run.embedding.weight  # type: ignore[attr-defined]

    @packs
    @pytest.mark.usefixtures("crossing")
    def test_rounding_never_reaches_the_files_that_the_weights_are_read_from(self, save: Callable[..., Path]) -> None:
        directory = save("llama")
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        model = Model.load(directory, torch.device("cpu"), torch.float32, "fp16")
        assert model.cpu_linear == "fp16"
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before

    def test_dense_leaves_the_weights_as_they_are(self, build: Build) -> None:
        network = build("llama")
        before = {name: weight.clone() for name, weight in network.named_parameters()}
        model = made(network, "dense")
        assert (model.packed_rows, model.cpu_linear) == (0, "dense")
        assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())

    @packs
    def test_auto_is_dense_and_exact_where_packed_is_not_faster(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(linears, "find_crossing", lambda _: Crossing(0, 1.0))
        network = build("llama")
        before = network.lm_head.weight.clone()
        assert made(network, "auto").cpu_linear == "dense"
        assert torch.equal(network.lm_head.weight, before)
        assert "CPU linears: dense, since weights in fp16 are not faster here" in caplog.text
        assert made(network, "fp16").cpu_linear == "fp16"

    @packs
    @pytest.mark.usefixtures("crossing")
    def test_weights_that_half_precision_does_not_hold_stay_dense(
        self, build: Build, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        network = build("llama", tie_word_embeddings=False)
        network.model.layers[1].mlp.down_proj.weight.data[0, 0] = 7e4
        with pytest.raises(UnsupportedModelError, match=r"but model\.layers\.1\.mlp\.down_proj\.weight has"):
            made(copy.deepcopy(network), "fp16")
        assert made(network, "auto").cpu_linear == "dense"
        assert "has values that fp16 does not hold" in caplog.text

    def test_a_cpu_without_them_stays_dense(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(linears, "available", lambda: False)
        assert made(build("llama"), "auto").cpu_linear == "dense"
        assert "CPU linears: dense, since this CPU has none with fp16 weights" in caplog.text
        with pytest.raises(UnsupportedModelError, match="this CPU has none with fp16 weights; use auto or dense"):
            made(build("llama"), "fp16")

    @packs
    @pytest.mark.usefixtures("crossing")
    @pytest.mark.parametrize("family", ["llama", "gpt_neox"])
    def test_products_that_are_off_are_left_out_with_a_warning(
        self,
        build: Build,
        ids: list[int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        family: str,
    ) -> None:
        multiply = linears._multiply
        monkeypatch.setattr(linears, "available", lambda: True)
        monkeypatch.setattr(linears, "_multiply", lambda *a: multiply(*a) * 1.01)
        model = made(build(family), "auto")
        assert model.cpu_linear == "dense"
        assert "without packed linears, whose logits differ" in caplog.text
        assert "weights that stay rounded" in caplog.text
        monkeypatch.undo()
        torch.testing.assert_close(logits(model, ids, [1] * 60), logits(model, ids, [60]), atol=5e-5, rtol=0)
        with monkeypatch.context() as patched:
            patched.setattr(linears, "find_crossing", lambda _: Crossing(8, 2.0))
            patched.setattr(linears, "available", lambda: True)
            patched.setattr(linears, "_multiply", lambda *a: multiply(*a) * 1.01)
            with pytest.raises(UnsupportedModelError, match="do not compute here what dense ones do"):
                made(build(family), "fp16")

    def test_half_precision_has_no_choice(self, build: Build) -> None:
        network = build("llama").to(torch.bfloat16)
        assert made(network, "auto").cpu_linear == ""
        with pytest.raises(UnsupportedModelError, match="they are for float32 on a CPU, and this is not"):
            made(network, "fp16")

    def test_a_model_without_plain_linears_stays_dense(self) -> None:
        assert forward._cannot_pack(torch.nn.Embedding(2, 2)) == "the model has none that could be packed"
