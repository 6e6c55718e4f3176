"""Models of many families, tiny and with random weights."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executor.native import library, tiles
from executor.native.kernel import NativeKernel
from executor.native.operators import NoKernelError
from executor.native.tiles import Tiles

Build = Callable[..., Any]

torch.set_num_threads(1)  # models as small as these lose time to threads that wait for each other

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that attention matters
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
SMALL_BY_OTHER_NAMES = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_BASES: dict[str, dict[str, Any]] = {
    "gpt2": SMALL_BY_OTHER_NAMES,
    "openai-gpt": SMALL_BY_OTHER_NAMES,
    "gpt_neox": SMALL,
    "bert": SMALL,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
}


@pytest.fixture(scope="session")
def build() -> Build:
    """`build("llama", **config)`: a network with weights that are the same every time."""

    def make(family: str, **config: Any) -> Any:
        torch.manual_seed(0)
        made = AutoConfig.for_model(family, **{**_BASES.get(family, GROUPED), **config})
        return AutoModelForCausalLM.from_config(made).eval()

    return make


@pytest.fixture
def save(build: Build, tmp_path: Path) -> Callable[..., Path]:
    """`save("llama", **config)`: the same as a model directory."""

    def make(family: str, **config: Any) -> Path:
        directory = tmp_path / family
        build(family, **config).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def native_kernel() -> NativeKernel:
    """The kernel as this machine compiles it, once for all runs of the tests; there is none without a compiler."""
    return NativeKernel(_compiled(library.attention))


@pytest.fixture(scope="session")
def native_tiles() -> Tiles:
    """Likewise the products on AMX tiles, which take a CPU that has them."""

    def source() -> library.Source:
        tiles.require_fit()
        return library.tiles()

    return Tiles(_compiled(source))


def _compiled(source: Callable[[], library.Source]) -> Path:
    try:
        place = library.place(source())
        if not library.is_there(place):
            library.require_tools()
    except NoKernelError as reason:
        pytest.skip(f"nothing native: {reason}")
    library.build(source(), place, threading.Event())
    return place
