"""Puts an executor together from its settings: model, pool and tree, engine, servicer. Imports torch, so it is slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry

from executor.additions import additions
from executor.admin import ExecutorAdminService
from executor.engine import Engine
from executor.mailbox import Outbox
from executor.memory import build_cache, check_memory
from executor.model import Model, choose_device, choose_dtype
from executor.native.adoption import Adoption
from executor.pace import step_tokens
from executor.scheduler import SchedulerLimits
from executor.service import ExecutorService
from executor.translate import Translator
from hermes.v1 import executor_pb2
from shared.metrics import ExecutorMetrics
from shared.models import ModelDirectory, model_version, resolve, tokenizer_fingerprint
from shared.settings import ExecutorSettings

log = logging.getLogger(__name__)


class Executor(NamedTuple):
    """What a running executor consists of."""

    engine: Engine
    adoption: Adoption
    service: ExecutorService
    admin: ExecutorAdminService
    metrics: ExecutorMetrics


def build(
    settings: ExecutorSettings,
    registry: CollectorRegistry,
    loop: asyncio.AbstractEventLoop,
    on_death: Callable[[], None],
) -> Executor:
    """Loads the model and takes the memory; the engine is not started yet. Raises StartupError.

    registry: where the metrics belong.
    loop: the event loop that serves.
    on_death: called on the engine's thread if it ends by a fault of its own.
    """
    outbox = Outbox(loop)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    directory = resolve(settings.model)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    check_memory(settings, device)
    log.info("loading %s in %s on %s", directory.path, _name(dtype), device)
    model = Model.load(directory.path, device, dtype, settings.cpu_linear)
    cache = build_cache(model.layout, settings)
    log.info("KV pool of %d tokens in blocks of %d", cache.capacity, cache.block_size)
    metrics = ExecutorMetrics(settings.model_name or directory.name, registry)
    engine = Engine(
        model,
        cache,
        SchedulerLimits(
            settings.max_batch_tokens,
            settings.max_running,
            settings.max_waiting,
            max_stall=settings.max_stall,
            step_tokens=step_tokens(model),
        ),
        metrics=metrics,
        retry_after_seconds=settings.retry_after_seconds,
        flush=outbox.flush,
        on_death=on_death,
    )
    metrics.watch(lambda: engine.load)
    adoption = Adoption(additions(settings.cpu_attention, model, engine))
    adoption.begin()
    info = _describe(settings, directory, model, cache.block_size)
    translator = Translator(
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        max_samples=settings.max_running,
        eos_token_ids=model.eos_token_ids,
        defaults=model.defaults,
        model_version=info.model_version,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
    )
    service = ExecutorService(engine, outbox, translator, info, prompt_timeout_seconds=settings.prompt_timeout_seconds)
    admin = ExecutorAdminService(
        engine,
        outbox,
        translator,
        bytes_per_token=model.layout.bytes_per_token,
        show_prompts=settings.show_prompts,
    )
    return Executor(engine, adoption, service, admin, metrics)


def _describe(
    settings: ExecutorSettings, directory: ModelDirectory, model: Model, block_size: int
) -> executor_pb2.GetModelInfoResponse:
    return executor_pb2.GetModelInfoResponse(
        model=settings.model_name or directory.name,
        model_version=model_version(directory.path),
        tokenizer_fingerprint=tokenizer_fingerprint(directory.path),
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        eos_token_ids=sorted(model.eos_token_ids),
        block_size=block_size,
        kv_bytes_per_token=model.layout.bytes_per_token,
        device=str(model.device),
        dtype=_name(model.dtype),
        cpu_linear=model.cpu_linear,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
