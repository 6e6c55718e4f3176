"""What a step costs before its first token, so that prompts beside running answers can be given their share of it."""

from __future__ import annotations

import math
import time
from typing import Final

import torch

from executor.attention import AttentionCall, AttentionPlan, StepCache
from executor.model import Model

_MANY: Final = 33  # enough for the tokens to show beside the fixed cost, few enough for a start
_RUNS: Final = 3


@torch.inference_mode()
def step_tokens(model: Model) -> float:
    """How many more tokens a step could run in the time that it takes before its first one.

    Reading the weights is most of that. Timed on a step of one token and on one of several; infinite where those take
    no longer, as on a GPU.
    """
    layout, device = model.layout, model.device
    pools = [
        [torch.zeros(_MANY, layout.kv_heads, layout.head_dim, dtype=layout.dtype, device=device) for _ in range(2)]
        for _ in range(layout.layers)
    ]
    keys, values = zip(*pools, strict=True)

    def least_seconds(tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        places = torch.arange(tokens, device=device)
        plan = AttentionPlan(places, [AttentionCall(slice(0, tokens), slice(0, tokens), causal=True)])
        least = math.inf
        for _ in range(_RUNS):
            begin = time.perf_counter()
            model.run(ids, places[None], places[-1:], StepCache(keys, values, plan)).sum().item()
            least = min(least, time.perf_counter() - begin)
        return least

    one, many = least_seconds(1), least_seconds(_MANY)
    each = (many - one) / (_MANY - 1)
    return one / each - 1.0 if each > 0.0 else math.inf
