"""A transformers model, loaded once and run on packed steps; its attention function and its cache are ours."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from executor.attention import ATTENTION_NAME, StepCache, UnsupportedModelError, running
from executor.batch import Batch
from executor.forward import choose_forward
from executor.probe import discover_layout, refuse_by_config
from shared.errors import StartupError
from shared.settings import CpuLinear


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers say of sampling, for fields that a request leaves out. None: they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Model:
    """A loaded model. `forward` belongs to the engine's thread."""

    def __init__(
        self,
        network: Any,
        defaults: GenerationDefaults,
        eos_token_ids: frozenset[int],
        cpu_linear: CpuLinear = "dense",
    ) -> None:
        """Takes a transformers causal LM in evaluation mode. Raises UnsupportedModelError where it cannot be served.

        cpu_linear: what its linears may become; with anything but "dense" the network's weights may be rounded.
        """
        config = network.config
        refuse_by_config(config)
        network.set_attn_implementation(ATTENTION_NAME)
        self.network = network
        self.defaults = defaults
        self.vocab_size = int(config.vocab_size)
        # Some small models keep the ids of the large one that they were cut from.
        self.eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < self.vocab_size)
        self.context_length = int(config.max_position_embeddings)
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self.layout = discover_layout(network)
        self._run, self.module, self.packed_rows = choose_forward(network, self.layout, cpu_linear)

    @property
    def cpu_linear(self) -> Literal["dense", "fp16", ""]:
        """How linears keep their weights where there is a choice: on a CPU in float32."""
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return ""
        return "fp16" if self.packed_rows else "dense"

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype, cpu_linear: CpuLinear = "dense") -> Model:
        """Loads a Hugging Face model directory. Raises StartupError with a sentence where it cannot be served."""
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            refuse_by_config(config)
            disable_progress_bar()  # a log is no terminal
            network, found = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            _require_all(found["missing_keys"])
            settings = _generation_config(directory)
            return cls(network.to(device).eval(), _defaults(settings), _eos_token_ids(settings, config), cpu_linear)
        except UnsupportedModelError as error:
            raise StartupError(f"The model in {directory} cannot be served: {error}.") from error
        except Exception as error:  # transformers, safetensors and the model's own code raise whatever they like
            said = (str(error).strip().splitlines() or ["it does not say why"])[0]
            raise StartupError(f"The model in {directory} cannot be loaded ({type(error).__name__}): {said}") from error

    @torch.inference_mode()
    def forward(self, batch: Batch, keys: Rows[Tensor], values: Rows[Tensor]) -> Tensor:
        """Runs a step over the pool's `keys` and `values`; returns `[works, vocab]` float32 logits."""
        return self.run(batch.token_ids, batch.positions, batch.last_rows, StepCache(keys, values, batch.plan))

    def run(self, token_ids: Tensor, positions: Tensor, rows: Tensor, cache: StepCache) -> Tensor:
        """One forward over `[1, T]` ids and positions; returns the logits of `rows`, `[rows, vocab]` float32."""
        with running(cache):
            return self._run(token_ids, positions, rows, cache)


def _require_all(missing: Collection[str]) -> None:
    """Raises UnsupportedModelError for weights that are in no file; transformers makes up random ones for them."""
    if missing:
        raise UnsupportedModelError(f"its files lack {len(missing)} of its weights, such as {min(missing)}")


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one. Raises StartupError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("device = cuda, but torch sees no CUDA device; use device = cpu, or install a CUDA build.")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU, where half precision is slower or inexact, and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings if isinstance(settings, dict) else {}


def _defaults(settings: Mapping[str, Any]) -> GenerationDefaults:
    names = GenerationDefaults.__dataclass_fields__
    return GenerationDefaults(**{name: settings[name] for name in names if settings.get(name) is not None})


def _eos_token_ids(settings: Mapping[str, Any], config: Any) -> frozenset[int]:
    ids = settings.get("eos_token_id")
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
