"""Which forward a model runs by: transformers' own or a lean one, with dense or packed linears, each proven first.

On a GPU, and in half precision, it is transformers' own as it is. On a CPU in single precision there is more to gain.
Everything that stands in for something is compared with eager attention on the same weights before it serves, and is
left out, with a line in the log, where it does not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from executor import linears
from executor.attention import StepCache, UnsupportedModelError
from executor.kv.pool import KVLayout
from executor.lean import LeanNetwork
from executor.probe import Probe, Run
from shared.settings import CpuLinear

log: Final = logging.getLogger(__name__)


class Forward(NamedTuple):
    """A forward that was proven."""

    run: Run
    module: nn.Module
    """What has its linears."""
    packed_rows: int = 0
    """The most rows that they take by packed weights; 0 where they are dense."""


def choose_forward(network: Any, layout: KVLayout, cpu_linear: CpuLinear) -> Forward:
    """The fastest forward that holds. Raises UnsupportedModelError where not even transformers' own does, and where
    `cpu_linear` asks for what cannot be.

    May round the network's weights to half precision, unless `cpu_linear` is "dense".
    """
    own = _own_run(network)
    probe = Probe(network, layout)
    probe.check(own)
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        if cpu_linear == "fp16":
            raise _not_packed("they are for float32 on a CPU, and this is not")
        return Forward(own, network)

    module, run = network, own
    if LeanNetwork.knows(network):
        lean = LeanNetwork(network).eval()
        if _holds(probe, lean, "a lean forward"):
            module = run = lean
    most_rows = _packed_rows(network, module, cpu_linear)
    if not most_rows:
        return Forward(run, module)

    linears.round_weights(module)
    probe = Probe(network, layout)  # anew, since it is the rounded weights that count now
    dense = list(linears.linears(module))
    linears.pack(module, most_rows)
    if _holds(probe, run, "packed linears"):
        return Forward(run, module, most_rows)
    for parent, name, linear in dense:
        setattr(parent, name, linear)
    if cpu_linear == "fp16":
        raise _not_packed("they do not compute here what dense ones do")
    log.warning("CPU linears: dense, with weights that stay rounded to fp16")
    return Forward(run, module)


def _own_run(network: Any) -> Run:
    """transformers' own forward, as it is."""

    def run(token_ids: Tensor, positions: Tensor, rows: Tensor, cache: StepCache) -> Tensor:
        logits: Tensor = network(
            input_ids=token_ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=rows
        ).logits
        return logits[0].float()

    return run


def _packed_rows(network: nn.Module, module: nn.Module, cpu_linear: CpuLinear) -> int:
    """Up to how many rows the linears of `module` should be packed; 0 is not at all. Raises UnsupportedModelError.

    network: where weights have the names that they have in their files.
    """
    if cpu_linear == "dense":
        return 0
    why = _cannot_pack(network)
    if why is not None:
        if cpu_linear == "fp16":
            raise _not_packed(why)
        log.info("CPU linears: dense, since %s", why)
        return 0
    crossing = linears.find_crossing(module)
    if cpu_linear == "fp16":
        crossing = linears.asked_for(crossing)
    if not crossing.most_rows:
        log.info("CPU linears: dense, since weights in fp16 are not faster here")
        return 0
    log.info(
        "CPU linears: weights in fp16, packed up to %d rows (%.1f times as fast at best), dense above",
        *crossing,
    )
    return crossing.most_rows


def _cannot_pack(network: nn.Module) -> str | None:
    """Why the network's linears cannot be packed, as the rest of a sentence; None where they can."""
    if not any(linears.linears(network)):
        return "the model has none that could be packed"
    if not linears.available():
        return "this CPU has none with fp16 weights"
    lost = linears.lost_in_half(network)
    return None if lost is None else f"{lost} has values that fp16 does not hold"


def _holds(probe: Probe, run: Callable[..., Tensor], what: str) -> bool:
    """Whether a forward gives the expected logits; says so where it does not."""
    try:
        off = probe.off(run)
    except UnsupportedModelError as error:
        log.warning("without %s: %s", what, error)
        return False
    if not probe.holds(off):
        log.warning("without %s, whose logits differ from eager attention's by %.2g of their norm", what, off)
        return False
    return True


def _not_packed(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cpu_linear = fp16 wants packed linears, but {why}; use auto or dense")
