"""The attention function that transformers' layers call, over keys and values that live in blocks.

A step packs the tokens of many sequences into one row `[1, T]`. Each layer hands its new keys and values to
`StepCache.update`, which writes them into the pool, and then calls `attend_step` with its queries. What is to be
attended to what is the same for every layer, so it is planned once a step (`batch.py`) and only carried out here.

Keys that several sequences share are read once with all their queries folded into one call. A softmax over a union
of key sets is the average of the softmaxes over the parts, weighted by their log-sum-exps, so the partial results
join exactly (the same identity that FlashAttention and cascade inference rest on).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from executor.native.kernel import KernelCall

ATTENTION_NAME: Final = "hermes"

_NOT_DONE_HERE: Final = {
    "sliding_window": "a sliding attention window",
    "softcap": "a soft cap on attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "position_bias": "a position bias",
    "alibi": "ALiBi position biases",
    "head_mask": "a head mask",
}


class UnsupportedModelError(Exception):
    """The model needs something of attention or of its cache that this executor does not do. Says which and why."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Some of the step's queries against one stretch of keys.

    `rows` tells which of the T packed queries, `slots` which rows of the pool: a slice is read where it lies, an index
    tensor is gathered. `mask` is `[queries, keys]`, added to the scores; `causal` means a square call whose mask is
    the lower triangle. With neither, every query sees every key. Never without keys: the CPU kernel dies of that.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step attends, for every layer alike.

    `native` covers every query where there is a kernel; else `own` covers each once, and `shared` adds to some.
    """

    slots: Tensor
    """`[T]` int64: the pool row that each of the step's tokens writes its key and value to."""
    own: Sequence[AttentionCall]
    shared: Sequence[AttentionCall] = ()
    native: KernelCall | None = None


class StepCache:
    """What transformers takes for its cache during one forward: writes into the pool, carries the plan."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], plan: AttentionPlan) -> None:
        self.plan = plan
        self.attended = 0
        """Calls of the attention function so far: one per layer, as the start-up probe checks."""
        self._keys = keys
        self._values = values

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores a layer's `[1, kv_heads, T, head_dim]`; returns its whole pool, `[slots, kv_heads, head_dim]`."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(0, self.plan.slots, key[0].transpose(0, 1))
        values.index_copy_(0, self.plan.slots, value[0].transpose(0, 1))
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always given explicitly, so no length is ever derived from the cache."""
        return 0

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attends a layer's queries `[1, heads, T, head_dim]` by the plan. Returns `[1, T, heads, head_dim]`."""
        self.attended += 1
        return attend_step(self.plan, query[0], keys, values, scale)[None]


def attend_step(plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Carries out a plan for one layer: query `[heads, T, head_dim]` in, output `[T, heads, head_dim]` out."""
    heads, tokens, head_dim = query.shape
    output = query.new_empty(tokens, heads, head_dim)
    if plan.native is not None:
        plan.native.kernel.attend(query, keys, values, plan.native.parts, scale=scale, output=output)
        return output
    weight = query.new_empty(tokens, heads, dtype=torch.float32) if plan.shared else None  # log-sum-exp of each row
    for call in plan.own:
        part, part_weight = _attend(call, query, keys, values, scale)
        output[call.rows] = part
        if weight is not None:
            weight[call.rows] = part_weight
    if weight is not None:
        for call in plan.shared:
            part, part_weight = _attend(call, query, keys, values, scale)
            old = weight[call.rows]
            joined = torch.logaddexp(old, part_weight)
            kept = output[call.rows] * (old - joined).exp().unsqueeze(-1)
            output[call.rows] = (kept + part * (part_weight - joined).exp().unsqueeze(-1)).to(output.dtype)
            weight[call.rows] = joined
    return output


def _attend(call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One call: returns the output `[queries, heads, head_dim]` and its log-sum-exp `[queries, heads]`."""
    kernel = _attend_cpu if query.device.type == "cpu" else _attend_anywhere
    output, weight = kernel(call, query[:, call.rows], keys[call.slots], values[call.slots], scale)
    return output.transpose(0, 1), weight.transpose(0, 1)


def _attend_cpu(
    call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash kernel for CPUs: reads strided views and fewer key heads than query heads as they are."""
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        dropout_p=0.0,
        is_causal=call.causal,
        attn_mask=call.mask,
        scale=scale,
    )
    return output[0], weight[0]


def _attend_anywhere(
    call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in plain matrix products, for devices without a kernel that returns the log-sum-exp."""
    heads, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = (query * scale).reshape(kv_heads, heads // kv_heads * queries, head_dim)  # scaled first: half overflows
    scores = (grouped @ keys.permute(1, 2, 0)).view(kv_heads, heads // kv_heads, queries, -1).float()
    if call.causal:
        later = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif call.mask is not None:
        scores = scores + call.mask
    weight = scores.logsumexp(-1, keepdim=True)
    shares = (scores - weight).exp().to(values.dtype).view(kv_heads, -1, scores.shape[-1])
    output = shares @ values.transpose(0, 1)
    return output.view(heads, queries, head_dim), weight.view(heads, queries)


class _Current(threading.local):
    cache: StepCache | None = None


_current: Final = _Current()


@contextmanager
def running(cache: StepCache) -> Iterator[None]:
    """Makes `cache` the one that this thread's attention calls find; not every model passes its cache on."""
    _current.cache = cache
    try:
        yield
    finally:
        _current.cache = None


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: `key` and `value` are what `StepCache.update` returned."""
    if _current.cache is None:
        raise RuntimeError("the attention function was called outside a step")
    if attention_mask is not None:
        _refuse("an attention mask of its own")
    for name, what in _NOT_DONE_HERE.items():
        if options.get(name) is not None:
            _refuse(what)
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse("attention in both directions")
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if query.shape[0] != 1 or key.shape[-1] != query.shape[-1] or key.dim() != 3:  # noqa: PLR2004 -- [slots, heads, width]
        _refuse("keys other than those that its cache returned")
    return _current.cache.attend(query, key, value, float(scale)), None


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(f"its attention layers use {what}")


AttentionInterface.register(ATTENTION_NAME, _attention_function)
