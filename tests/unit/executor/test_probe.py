"""Which models are served, which are refused, and in what words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config

from executor import attention, probe
from executor.attention import AttentionCall, UnsupportedModelError
from executor.model import GenerationDefaults, Model, choose_device, choose_dtype
from shared.errors import StartupError

Build = Callable[..., Any]
Save = Callable[..., Path]
CPU = torch.device("cpu")

NO_CAP = {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
MIXTURE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENTION_SINKS = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def made(network: Any) -> Model:
    return Model(network, GenerationDefaults(), frozenset())


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    return Model.load(directory, CPU, dtype)


SERVED = [
    ("llama", {"tie_word_embeddings": True}, 2, 8),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 2, 8),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        2,
        8,
    ),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, 2, 8),
    ("qwen3", {"head_dim": 16}, 2, 16),
    ("qwen3_moe", MIXTURE, 2, 16),
    ("phi3", {"sliding_window": None}, 2, 8),
    ("mistral", {"sliding_window": None}, 2, 8),
    ("gemma2", {"head_dim": 16, **NO_CAP}, 2, 16),
    ("gemma3_text", {"head_dim": 16, "layer_types": ["full_attention"] * 2}, 2, 16),
    ("gpt2", {}, 4, 8),
    ("gpt_neox", {"tie_word_embeddings": False}, 4, 8),
    ("stablelm", {}, 2, 8),
]


@pytest.mark.parametrize(("family", "config", "kv_heads", "head_dim"), SERVED)
def test_full_attention_is_served(build: Build, family: str, config: Any, kv_heads: int, head_dim: int) -> None:
    model = made(build(family, **config))
    assert (model.layout.layers, model.layout.kv_heads, model.layout.head_dim) == (2, kv_heads, head_dim)
    assert (model.vocab_size, model.context_length) == (64, 128)


REFUSED = [
    ("mistral", {"sliding_window": 16}, "a sliding window of 16 tokens; only full attention"),
    ("phi3", {"sliding_window": 16}, "a sliding window of 16 tokens"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "its layers use sliding_att"),
    ("gemma2", {"head_dim": 16}, "its layers use sliding_attention; only full attention"),
    ("gemma3_text", {"head_dim": 16}, "its layers use sliding_attention"),
    ("gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 2}, "a soft cap on attention scores"),
    ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}, "RoPE type 'longrope' depends on"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "RoPE type 'dynamic'"),
    ("deepseek_v3", LATENT, "its keys are 16 wide and its values 8; both must have one width"),
    ("gpt_oss", ATTENTION_SINKS, "its attention layers use attention sinks"),
    ("bert", {"is_decoder": False}, "attention in both directions"),
    ("bloom", {}, "names no context length"),
    ("openai-gpt", {}, "called the attention function 0 times and the cache for 0 layers in a forward of 2"),
    ("xglm", {"num_layers": 2, "attention_heads": 4}, "its code does not run with this executor's attention and cache"),
    ("falcon", {"alibi": True}, "ALiBi"),
]


@pytest.mark.parametrize(("family", "config", "why"), REFUSED)
def test_what_needs_more_is_refused_with_the_reason(build: Build, family: str, config: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        made(build(family, **config))


def test_a_model_that_takes_the_attention_name_but_keeps_its_own_attention_is_refused(build: Build) -> None:
    network = build("bloom")
    network.config.max_position_embeddings = 128  # else its config alone is reason enough
    with pytest.raises(UnsupportedModelError, match="does not run with this executor's attention and cache"):
        made(network)


def test_rope_types_are_looked_for_in_each_kind_of_layer(build: Build) -> None:
    config = build("llama").config
    config.rope_parameters = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        probe.refuse_by_config(config)


class TestProbeRun:
    """The run against eager attention."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", ["llama", "gpt_neox"])
    def test_it_passes_in_each_dtype(self, build: Build, family: str, dtype: torch.dtype) -> None:
        assert made(build(family).to(dtype)).layout.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_sees_attention_that_looks_ahead(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        kernel = attention._attend_cpu
        monkeypatch.setattr(
            attention, "_attend_cpu", lambda call, *rest: kernel(AttentionCall(call.rows, call.slots), *rest)
        )
        with pytest.raises(UnsupportedModelError, match=r"logits differ from eager attention's by \d"):
            made(build("llama").to(dtype))

    def test_it_sees_a_scale_that_is_off(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = attention._attend_cpu
        monkeypatch.setattr(attention, "_attend_cpu", lambda *a: kernel(*a[:4], a[4] * 1.01))
        with pytest.raises(UnsupportedModelError, match="differ from eager"):
            made(build("llama"))

    def test_it_sees_logits_that_are_not_numbers(self, build: Build) -> None:
        network = build("llama")
        network.lm_head.weight.data[5] = float("nan")
        with pytest.raises(UnsupportedModelError, match="differ from eager attention's by nan"):
            made(network)

    def test_it_wants_a_logit_for_each_token_of_the_vocabulary(self, build: Build) -> None:
        network = build("llama")
        network.config.vocab_size = 60
        with pytest.raises(UnsupportedModelError, match="64 logits for a vocabulary of 60"):
            made(network)

    def test_lack_of_memory_is_not_taken_for_the_models_fault(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(attention, "_attend_cpu", fails)
        with pytest.raises(torch.OutOfMemoryError):
            made(build("llama"))


class TestLoad:
    """A directory in, a model or one sentence out."""

    def test_a_directory_is_loaded_with_its_makers_advice(self, save: Save) -> None:
        directory = save("llama")
        (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20}')
        model = load(directory)
        assert model.eos_token_ids == {2, 3}
        assert model.defaults == GenerationDefaults(temperature=0.6, top_k=20)

    def test_tied_and_untied_heads_are_loaded(self, save: Save) -> None:
        tied = load(save("llama", tie_word_embeddings=True)).network
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        untied = load(save("qwen2", tie_word_embeddings=False)).network
        assert untied.lm_head.weight is not untied.model.embed_tokens.weight

    def test_the_dtype_is_what_was_asked_for(self, save: Save) -> None:
        assert load(save("llama"), torch.bfloat16).layout.dtype == torch.bfloat16

    def test_an_end_of_sequence_token_outside_the_vocabulary_never_comes(self, save: Save) -> None:
        directory = save("gpt2", eos_token_id=50256)
        assert load(directory).eos_token_ids == frozenset()

    @pytest.mark.parametrize(
        ("family", "config", "why"),
        [
            ("mistral", {"sliding_window": 16}, "a sliding window of 16 tokens"),
            ("gpt_oss", ATTENTION_SINKS, "attention sinks"),
        ],
    )
    def test_what_cannot_be_served_is_a_sentence(self, save: Save, family: str, config: Any, why: str) -> None:
        directory = save(family, **config)
        with pytest.raises(StartupError, match=f"{directory} cannot be served: .*{why}.*\\.$"):
            load(directory)

    def test_an_encoder_decoder_is_refused(self, tmp_path: Path) -> None:
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4).save_pretrained(tmp_path)
        with pytest.raises(StartupError, match="it is an encoder-decoder; only decoder-only models are served"):
            load(tmp_path)

    def test_weights_that_are_in_no_file_are_missed(self, save: Save) -> None:
        directory = save("llama", tie_word_embeddings=True)
        _edit(directory / "config.json", tie_word_embeddings=False)
        with pytest.raises(StartupError, match=r"its files lack 1 of its weights, such as lm_head\.weight"):
            load(directory)

    def test_models_that_bring_code_are_not_run(self, save: Save) -> None:
        directory = save("llama")
        _edit(directory / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
        (directory / "own.py").write_text("raise SystemExit")
        with pytest.raises(StartupError, match="cannot be loaded"):
            load(directory)

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("config.json", None),
            ("config.json", b"{"),
            ("config.json", b"{}"),
            ("config.json", b'{"model_type": "unheard-of"}'),
            ("config.json", b'{"model_type": "llama", "vocab_size": "many"}'),
            ("model.safetensors", None),
            ("model.safetensors", b"torn"),
            ("generation_config.json", b"{"),
        ],
    )
    def test_a_damaged_directory_is_a_sentence(self, save: Save, file: str, content: bytes | None) -> None:
        directory = save("llama")
        if content is None:
            (directory / file).unlink()
        else:
            (directory / file).write_bytes(content)
        with pytest.raises(StartupError, match=f"{directory} cannot be loaded .+") as caught:
            load(directory)
        assert "\n" not in str(caught.value)

    def test_a_directory_that_is_not_there_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match="cannot be loaded"):
            load(tmp_path / "nowhere")


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_cuda_must_be_there_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(StartupError, match="use device = cpu"):
        choose_device("cuda")


def test_the_dtype_follows_the_device_unless_it_is_named() -> None:
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("float16", CPU) == torch.float16
