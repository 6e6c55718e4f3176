"""Starts an executor: `hermes-executor`, or `python -m executor`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import torch

from executor.engine import Engine
from executor.memory import build_cache
from executor.model import Model, choose_device, choose_dtype
from executor.scheduler import SchedulerLimits
from executor.service import ExecutorAdminService, ExecutorService, Outbox
from executor.translate import Translator
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared import server as hermes_server
from shared.config import ExecutorSettings
from shared.errors import StartupError
from shared.fingerprints import model_version, tokenizer_fingerprint
from shared.models import resolve
from shared.server import Health

log = logging.getLogger(__name__)

SERVICE: Final = "hermes.v1.Executor"


class ExecutorApplication:
    """The executor as its server runs it."""

    name = "executor"
    services: Sequence[str] = (SERVICE, "hermes.v1.ExecutorAdmin")

    def __init__(self, settings: ExecutorSettings) -> None:
        if settings.max_running > settings.max_batch_tokens:
            raise StartupError(
                f"max_running {settings.max_running} is above max_batch_tokens {settings.max_batch_tokens};"
                " a step must have room for a token of each running request."
            )
        self._settings = settings
        self._engine: Engine | None = None

    async def start(self, server: grpc.aio.Server, health: Health) -> None:
        """Loads the model, starts the engine, adds the servicers. Raises StartupError."""
        loop = asyncio.get_running_loop()
        outbox = Outbox(loop)

        def on_death() -> None:
            asyncio.run_coroutine_threadsafe(health.set(SERVICE, serving=False), loop)

        service = await asyncio.to_thread(self._build, outbox, on_death)
        executor_pb2_grpc.add_ExecutorServicer_to_server(service, server)
        executor_pb2_grpc.add_ExecutorAdminServicer_to_server(ExecutorAdminService(), server)
        await health.set(SERVICE, serving=True)

    async def drain(self) -> None:
        """Running requests end by themselves; the server waits for their calls."""

    async def stop(self) -> None:
        """Ends the engine after the step that runs."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    def _build(self, outbox: Outbox, on_death: Callable[[], None]) -> ExecutorService:
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        directory = resolve(settings.model)
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        log.info("loading %s as %s on %s", directory.path, dtype, device)
        model = Model.load(directory.path, device, dtype)
        cache = build_cache(model.layout, settings)
        engine = Engine(
            model,
            cache,
            SchedulerLimits(settings.max_batch_tokens, settings.max_running, settings.max_waiting),
            retry_after_seconds=settings.retry_after_seconds,
            flush=outbox.flush,
            on_death=on_death,
        )
        info = executor_pb2.GetModelInfoResponse(
            model=settings.model_name or directory.name,
            model_version=model_version(directory.path),
            tokenizer_fingerprint=tokenizer_fingerprint(directory.path),
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=sorted(model.eos_token_ids),
            block_size=cache.block_size,
            kv_bytes_per_token=model.layout.bytes_per_token,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )
        translator = Translator(
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            model_version=info.model_version,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
        )
        log.info("KV pool: %d tokens in blocks of %d", cache.capacity, cache.block_size)
        engine.start()
        self._engine = engine
        return ExecutorService(engine, outbox, translator, info, prompt_timeout_seconds=settings.prompt_timeout_seconds)


def main(argv: list[str] | None = None) -> int:
    """Runs an executor until it is told to stop. Returns the exit code."""
    return hermes_server.main(ExecutorSettings, ExecutorApplication, argv)


if __name__ == "__main__":
    sys.exit(main())
