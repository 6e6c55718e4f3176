from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_tiny_gguf(tmp_path: Path) -> WriteGguf:
    """Writes a Llama of one layer with random weights: all that the converter reads, in a few kilobytes."""

    def write(*, pre: str = "smollm", leave_out: str = "", extra_tensor: str = "") -> Path:
        file = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(16)
        writer.add_feed_forward_length(24)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(4)
        writer.add_vocab_size(6)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"])
        writer.add_token_types([3, 3, 3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{{ messages }}")
        shapes = {"token_embd": (6, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
        shapes |= {"blk.0.attn_q": (16, 16), "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16)}
        shapes |= {"blk.0.attn_output": (16, 16), "blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16)}
        shapes |= {"blk.0.ffn_down": (16, 24)} | ({extra_tensor: (4,)} if extra_tensor else {})
        random = np.random.default_rng(0)
        for name, shape in shapes.items():
            if name != leave_out:
                writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


@pytest.fixture
def tiny_gguf(write_tiny_gguf: WriteGguf) -> Path:
    return write_tiny_gguf()
