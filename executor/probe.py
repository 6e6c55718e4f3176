"""Whether a model can be served: what its config says, what its layers keep, and runs against eager attention.

The model's own code runs with our attention function and our cache, which holds for models whose every layer is full
attention with one key and value width. Whatever needs more is refused here, with a sentence that says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from executor.attention import ATTENTION_NAME, AttentionCall, AttentionPlan, StepCache, UnsupportedModelError, running
from executor.kv.pool import KVLayout

Run = Callable[[Tensor, Tensor, Tensor, StepCache], Tensor]
"""One forward: `[1, T]` ids and positions, the rows of T that are wanted, and the step's cache in; their logits,
`[rows, vocab]` float32, out."""

_PROBE_TOKENS: Final = 13  # a chunk, a chunk that goes on, a decode: all the forms that a call can have
_PROBE_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far the logits may be off, as a share of their norm. Summing in another order costs SmolLM2-135M 1e-6, 2e-3 and
9e-3 of it; attention that looks ahead, 0.4 and more."""
_BATCH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


def refuse_by_config(config: Any) -> None:
    """Raises UnsupportedModelError for what the config alone shows to be out of reach."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder; only decoder-only models are served")
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise UnsupportedModelError("its config names no context length (max_position_embeddings)")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(f"its layers use {', '.join(sorted(kinds))}; only full attention is served")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < context and getattr(config, "layer_types", None) is None:
        raise UnsupportedModelError(
            f"its layers use a sliding window of {window} tokens; only full attention is served"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError("its layers use a soft cap on attention scores")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("its layers use ALiBi position biases")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for kind in sorted(_rope_types(rope) & _BATCH_DEPENDENT_ROPE):
        raise UnsupportedModelError(
            f"its RoPE type '{kind}' depends on the batch's longest position, so cached keys would not hold"
        )


def _rope_types(rope: Any) -> set[str]:
    """The RoPE types that a config names: one, or one for each kind of layer."""
    if not isinstance(rope, Mapping):
        return set()
    kinds = {str(kind) for key in ("rope_type", "type") if (kind := rope.get(key)) is not None}
    return kinds.union(*(_rope_types(part) for part in rope.values()))


@contextmanager
def _foreign_code() -> Iterator[None]:
    """A model's own code may raise anything over a cache or an attention that is not what it expects."""
    try:
        yield
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or ["it does not say why"])[0]
        raise UnsupportedModelError(
            f"its code does not run with this executor's attention and cache ({type(error).__name__}: {said})"
        ) from error


class _RecordingCache(StepCache):
    """Finds out what each layer keeps: notes the shapes, and stores nothing."""

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__((), (), plan)
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self.shapes:
            raise UnsupportedModelError(f"layer {layer_idx} updates its cache twice in one forward")
        self.shapes[layer_idx] = key.shape, value.shape
        if key.shape != value.shape:
            raise UnsupportedModelError(
                f"its keys are {key.shape[-1]} wide and its values {value.shape[-1]}; both must have one width"
            )
        return key[0].transpose(0, 1), value[0].transpose(0, 1)


@torch.inference_mode()
def discover_layout(network: Any) -> KVLayout:
    """Runs one token to see what the layers keep of it. Raises UnsupportedModelError where they differ."""
    one = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
    cache = _RecordingCache(AttentionPlan(one[0], [AttentionCall(slice(0, 1), slice(0, 1))]))
    with _foreign_code(), running(cache):
        network(input_ids=one, position_ids=one, cache=cache, use_cache=True)
    layers = int(network.config.num_hidden_layers)
    if cache.attended != layers or len(cache.shapes) != layers:
        raise UnsupportedModelError(
            f"it called the attention function {cache.attended} times and the cache for {len(cache.shapes)} layers"
            f" in a forward of {layers}"
        )
    if len(set(cache.shapes.values())) != 1:
        raise UnsupportedModelError("its layers keep keys of different shapes")
    _, kv_heads, _, head_dim = cache.shapes[0][0]
    return KVLayout(layers, kv_heads, head_dim, network.dtype, network.device)


class Probe:
    """Two sequences that run in chunks through a small pool, and the logits that eager attention gives for them.

    The first runs as a chunk and one that goes on, then as a decode step beside the whole of the second, so that every
    form of call is seen.
    """

    @torch.inference_mode()
    def __init__(self, network: Any, layout: KVLayout) -> None:
        """Asks eager attention. Raises UnsupportedModelError where the network has other logits than a vocabulary."""
        vocab_size, device = int(network.config.vocab_size), layout.device
        generator = torch.Generator().manual_seed(0)
        self._layout = layout
        self._ids = torch.randint(0, vocab_size, (2, _PROBE_TOKENS), generator=generator).to(device)
        self._places = torch.arange(_PROBE_TOKENS, device=device)
        with _foreign_code():
            network.set_attn_implementation("eager")
            positions = self._places[None].expand(2, -1)
            expected = network(input_ids=self._ids, position_ids=positions, use_cache=False).logits.float()
            network.set_attn_implementation(ATTENTION_NAME)
        if expected.shape[-1] != vocab_size:
            raise UnsupportedModelError(f"it has {expected.shape[-1]} logits for a vocabulary of {vocab_size}")
        self._expected = expected

    def check(self, run: Run) -> None:
        """Raises UnsupportedModelError when a logit of `run` is off by more than the dtype's rounding."""
        off = self.off(run)
        if not self.holds(off):
            raise UnsupportedModelError(
                f"with this executor's attention its logits differ from eager attention's by {off:.2%}"
            )

    def holds(self, off: float) -> bool:
        """Whether logits that are `off` by so much are the same but for rounding."""
        return off <= _PROBE_TOLERANCE[self._layout.dtype]

    @torch.inference_mode()
    def off(self, run: Run) -> float:
        """How far the logits of `run` are from those expected, as a share of their norm: of the worst step."""
        layout, ids, places, expected = self._layout, self._ids, self._places, self._expected
        length, device = _PROBE_TOKENS, layout.device
        shape = (2 * length, layout.kv_heads, layout.head_dim)
        keys = [torch.zeros(shape, dtype=layout.dtype, device=device) for _ in range(layout.layers)]
        values = [torch.zeros_like(key) for key in keys]
        split, last = length // 2, length - 1
        mask = torch.full((last - split, last), float("-inf"), dtype=layout.dtype, device=device).triu_(split + 1)
        # (tokens, positions, slots written, calls, where the logits are expected)
        steps = [
            (ids[0, :split], places[:split], places[:split],
             [AttentionCall(slice(None), slice(0, split), causal=True)], expected[0, :split]),
            (ids[0, split:last], places[split:last], places[split:last],
             [AttentionCall(slice(None), slice(0, last), mask=mask)], expected[0, split:last]),
            (torch.cat([ids[0, last:], ids[1]]), torch.cat([places[last:], places]),
             places.new_tensor(range(last, 2 * length)),
             [AttentionCall(slice(0, 1), slice(0, length)),
              AttentionCall(slice(1, None), length + places, causal=True)],
             torch.cat([expected[0, last:], expected[1]])),
        ]  # fmt: skip
        off = []
        for token_ids, positions, slots, calls, wanted in steps:
            rows = torch.arange(len(token_ids), device=device)
            cache = StepCache(keys, values, AttentionPlan(slots, calls))
            with _foreign_code(), running(cache):
                got = run(token_ids[None], positions[None], rows, cache)
            off.append((got - wanted).norm() / wanted.norm())
        return float(torch.stack(off).max())  # which is no number if one of them is none
