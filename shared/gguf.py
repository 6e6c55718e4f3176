"""Turn the GGUF file of a Llama model into a Hugging Face directory: python -m shared.gguf SOURCE TARGET.

A process of its own, so that the memory goes back when it ends, and a signal can stop it at any point. It reads the
file with the gguf package rather than through transformers, whose GGUF loader

- needs torch and half a minute for what takes seconds here, and marks the model as quantized, so it cannot be saved;
- ignores tokenizer.ggml.pre and gives every "gpt2" vocabulary the plain GPT-2 pre-tokenizer, which joins digits to the
  space before them: other ids than the model learned for "a\\n 5" or indented numbers;
- loses the context length for the tokenizer, and turns an epsilon of 1e-05 into 9.999999747378752e-06.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import StartupError

# Token types of the GGUF specification (tokenizer.ggml.token_type).
_NORMAL, _CONTROL = 1, 3

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
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
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Metadata:
    """The key-value part of a GGUF file."""

    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        try:
            return self.values[key]
        except KeyError:
            raise StartupError(f"The GGUF file has no {key}.") from None

    def expect(self, key: str, known: str) -> None:
        """Raises StartupError where a key does not have the one value that the converter was proved with."""
        if (value := self[key]) != known:
            raise StartupError(f"The GGUF file has {key} = {value!r}; only {known!r} can be converted.")


def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write config, generation config, tokenizer, chat template and float32 weights of a GGUF file to a new directory.

    Weights stay float32: the values that quantization left need more bits than float16 or bfloat16 have.
    Raises StartupError where the file holds something that the converter does not know.
    """
    try:
        import gguf  # noqa: PLC0415  callers that only want the directory need not have it
    except ModuleNotFoundError as error:
        raise StartupError("The package gguf is not installed: pip install gguf.") from error
    progress(f"reading {source.name}")
    reader = gguf.GGUFReader(source)
    metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    metadata.expect("general.architecture", "llama")
    target.mkdir()
    _write_json(target / "config.json", _config(metadata, tied=all(t.name != "output.weight" for t in reader.tensors)))
    _write_json(target / "generation_config.json", _token_ids(metadata))
    progress("writing the tokenizer")
    _write_tokenizer(metadata, target)
    progress(f"dequantizing {len(reader.tensors)} tensors to float32")
    _write_weights(metadata, dict(_dequantized(reader.tensors)), target)


def _token_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    if any(key.startswith("llama.rope.scaling") for key in metadata.values):
        raise StartupError("The GGUF file scales its rotary embedding, which cannot be converted.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata["llama.context_length"],
        # The file keeps it in 32 bits; the shortest decimal of those is what the model's author wrote.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        **_token_ids(metadata),
    }


def _write_tokenizer(metadata: Metadata, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415  only the child needs it

    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", "smollm")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if unknown := set(types) - {_NORMAL, _CONTROL}:
        raise StartupError(f"The GGUF file has tokens of the types {sorted(unknown)}, which cannot be converted.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # llama.cpp's "smollm" is \p{N}, then GPT-2's regular expression: each digit by itself, and only then words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.save(str(target / "tokenizer.json"))

    settings = {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer builds its own pre-tokenizer, without the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
    }
    _write_json(target / "tokenizer_config.json", settings)
    (target / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8", newline="")


def _dequantized(tensors: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and float32 values of each tensor; shapes are as in torch, (out, in)."""
    from gguf.quants import dequantize  # noqa: PLC0415  only the child needs it

    for tensor in tensors:
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type)


def _write_weights(metadata: Metadata, tensors: Mapping[str, NDArray[np.float32]], target: Path) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415  only the child needs it

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for name, values in tensors.items():
        if known := _TENSORS.get(name):
            weights[known] = values
        elif (match := _LAYER_TENSOR.fullmatch(name)) and (part := _LAYER_TENSORS.get(match[2])):
            ordered = unpermuted(values, heads[match[2]]) if match[2] in heads else values
            weights[f"model.layers.{match[1]}.{part}.weight"] = np.ascontiguousarray(ordered)
        else:
            raise StartupError(f"The GGUF file has a tensor {name}, which cannot be converted.")
    expected = metadata["llama.block_count"] * len(_LAYER_TENSORS) + len(_TENSORS) - ("lm_head.weight" not in weights)
    if len(weights) != expected:
        raise StartupError(f"The GGUF file has {len(weights)} tensors instead of {expected}: it is not complete.")
    # transformers refuses a file that does not name its format
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def unpermuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Query or key weights (heads * d, in) with the rows of each head in the order that transformers rotates.

    GGUF has the pairs of the rotary embedding side by side, (d/2, 2); transformers has them half a head
    apart, (2, d/2).
    """
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Convert `arguments` = [source, target]; progress goes to stdout, what failed to stderr. Returns the exit code."""
    try:
        source, target = map(Path, arguments)
    except ValueError:
        sys.stderr.write("usage: python -m shared.gguf SOURCE TARGET\n")
        return 2
    try:
        convert(source, target, _say)
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
