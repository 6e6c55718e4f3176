"""Llama and its like in fewer operations than transformers' own code takes, over the same weights.

At a few rows a step's operations cost less than what calls them: thirty layers of transformers' code spend as long
around their linears as a small model's linears take. This forward has one product for query, key and value and one for
gate and up, normalizes and rotates in a few fused operations, and builds no masks and no outputs that nobody asks for.
Cache and attention are called as transformers' layers call them.

Only for classes whose code is known to be this; `Model` proves it at each start against transformers' own.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor.attention import ATTENTION_NAME, StepCache

_FAMILIES: Final = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}ForCausalLM"
    for family, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
)
_PROJECTIONS: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS: Final = frozenset({"q_norm", "k_norm"})
_MLP: Final = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
_LAYER: Final = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})


class LeanNetwork(nn.Module):
    """A whole forward over the weights of a transformers network, whose joined linears become views of this one's."""

    def __init__(self, network: Any) -> None:
        """Takes a network that `knows` says yes to."""
        super().__init__()
        body = network.model
        self.embedding, self.rotary, self.head = body.embed_tokens, body.rotary_emb, network.lm_head
        self.layers = nn.ModuleList(_Layer(layer, index) for index, layer in enumerate(body.layers))
        self.norm = _Norm(body.norm, body.norm.weight)

    @staticmethod
    def knows(network: Any) -> bool:
        """Whether the network's class is one of those that this forward is written after, part by part."""
        if f"{type(network).__module__}.{type(network).__qualname__}" not in _FAMILIES:
            return False
        if set(dict(network.named_children())) != {"model", "lm_head"}:
            return False
        if set(dict(network.model.named_children())) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            return False
        return all(_known_layer(layer) for layer in network.model.layers)

    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor, cache: StepCache) -> Tensor:
        """`[1, T]` ids and positions, the rows of T whose logits are wanted; returns their logits, `[rows, vocab]`."""
        hidden = self.embedding(token_ids[0])
        cos, sin = self.rotary(hidden, positions)
        cos, sin = cos[0, :, None], sin[0, :, None]  # [T, 1, head_dim]: the same for all heads
        sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), -1)
        attend = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, cache, attend)
        logits: Tensor = self.head(self.norm(hidden[rows]))
        return logits


class _Layer(nn.Module):
    """Attention and MLP of one layer, each with its norm before it and its sum after it."""

    is_causal = True  # the attention function asks its module

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.width = int(attention.head_dim)
        self.scaling = float(attention.scaling)
        self.heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.qkv, self.out = _joined(attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj
        self.gate_up, self.down = _joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self.activation = mlp.act_fn
        self.before_attention = _Norm(layer.input_layernorm, layer.input_layernorm.weight)
        self.before_mlp = _Norm(layer.post_attention_layernorm, layer.post_attention_layernorm.weight)
        self.of_heads: _Norm | None = None
        if hasattr(attention, "q_norm"):
            weights = (
                attention.q_norm.weight.expand(self.heads, -1),
                attention.k_norm.weight.expand(self.kv_heads, -1),
            )
            self.of_heads = _Norm(attention.q_norm, torch.cat(weights))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: StepCache, attend: Any) -> Tensor:
        """`[T, hidden]` in and out; `cos` and `sin` `[T, 1, head_dim]`, the first half of `sin` negated."""
        tokens, rotated = len(hidden), self.heads + self.kv_heads
        joined = self.qkv(self.before_attention(hidden)).view(tokens, rotated + self.kv_heads, self.width)
        turned = joined[:, :rotated]
        if self.of_heads is not None:
            turned = self.of_heads(turned)
        swapped = turned.unflatten(2, (2, self.width // 2)).flip(2).reshape(tokens, rotated, self.width)
        turned = torch.addcmul(turned * cos, swapped, sin).transpose(0, 1)[None]
        value = joined[:, rotated:].transpose(0, 1)[None]
        keys, values = cache.update(turned[:, self.heads :], value, self.index)
        attended, _ = attend(self, turned[:, : self.heads], keys, values, None, scaling=self.scaling)
        hidden = hidden + self.out(attended.reshape(tokens, -1))
        gate, up = self.gate_up(self.before_mlp(hidden)).chunk(2, -1)
        output: Tensor = hidden + self.down(self.activation(gate).mul_(up))
        return output


class _Norm(nn.Module):
    """RMS norm over the last dimension."""

    weight: Tensor
    epsilon: Tensor

    def __init__(self, norm: Any, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("epsilon", torch.tensor(float(norm.variance_epsilon)), persistent=False)
        self.share = 1 / weight.shape[-1]

    def forward(self, rows: Tensor) -> Tensor:
        # From the length of a row: a sum of squares in one operation, where pow and mean are two slow ones.
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return torch.addcmul(self.epsilon, length, length, value=self.share).rsqrt_() * rows * self.weight


@torch.no_grad()
def _joined(*parts: nn.Linear) -> nn.Linear:
    """One linear with the outputs of all the parts, side by side. The parts' weights become views of its own."""
    sizes = [part.out_features for part in parts]
    whole = nn.Linear(parts[0].in_features, sum(sizes), bias=parts[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    for part, weight in zip(parts, torch.split(whole.weight, sizes), strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        for part, bias in zip(parts, torch.split(whole.bias, sizes), strict=True):
            part.bias = nn.Parameter(bias, requires_grad=False)
    return whole


def _known_layer(layer: Any) -> bool:
    """Whether a layer has the parts that `_Layer` is made of, and no others."""
    if set(dict(layer.named_children())) != _LAYER:
        return False
    attention = dict(layer.self_attn.named_children())
    mlp = dict(layer.mlp.named_children())
    if set(attention) not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS) or set(mlp) != _MLP:
        return False
    projections = [attention[name] for name in _PROJECTIONS] + [mlp[name] for name in _MLP - {"act_fn"}]
    if any(type(projection) is not nn.Linear for projection in projections):
        return False
    biases = [attention[name].bias is None for name in ("q_proj", "k_proj", "v_proj")]
    return len(set(biases)) == 1 and (mlp["gate_proj"].bias is None) == (mlp["up_proj"].bias is None)
