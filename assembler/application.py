"""The assembler as its server runs it."""

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from prometheus_client import CollectorRegistry

from assembler import model_files
from assembler.answer_format import AnswerFormats
from assembler.cache.build import build
from assembler.cache.cache import AssemblyCache
from assembler.metrics import AssemblerMetrics
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.orders import Policies
from assembler.pipeline import Assembler
from assembler.recall import Recall
from assembler.service import AssemblerAdminService, AssemblerService
from assembler.upstream import Upstream
from hermes.v1 import assembler_pb2_grpc
from shared import models, server
from shared.metrics import Endpoint
from shared.settings import AssemblerSettings

SERVICE: Final = "hermes.v1.Assembler"
ADMIN_SERVICE: Final = "hermes.v1.AssemblerAdmin"
# Health name that tells whether answers can be had, and not only prompts.
GENERATE: Final = "hermes.v1.Assembler.Generate"

# How long a thread may run on while others wait. Long prompts are worked on beside the event loop, and each time that
# it wants to go on it waits for so long; with Python's own 5 ms a health check takes tens of them.
SWITCH_SECONDS: Final = 0.0005
# Objects made before Python looks for cycles among them, of which requests have few; a chat of 80 messages makes more
# than its own 700.
COLLECT_AT: Final = (20_000, 20, 50)
# For the cache's database to open, which another process may hold; without it the service starts with memory alone.
_OPEN_SECONDS: Final = 15.0
# Between looks at how much is in the cache.
_REPORT_SECONDS: Final = 1.0

_log: Final = logging.getLogger(__name__)


class Model(NamedTuple):
    """name: what callers call it. fingerprint: the tokenizer's digest."""

    name: str
    fingerprint: str
    files: ModelFiles


def assembler_of(
    settings: AssemblerSettings, model: Model, cache: AssemblyCache, metrics: AssemblerMetrics
) -> Assembler:
    """An assembler as settings want it, with all in its keys that can change what it makes."""
    policies = Policies(
        unknown_role=settings.unknown_role,
        order=OrderPolicy(
            merge_system=settings.merge_system,
            merge_same_role=settings.merge_same_role,
            strict=settings.strict,
        ),
        control_text=settings.control_text,
        log_head_tail=settings.log_prompts == "head_tail",
        insight=settings.insight,
    )
    text_facts = (model.fingerprint, *model.files.encoding_facts())
    server_facts = (model.name, *text_facts, *model.files.template_facts(), *policies.facts())
    recall = Recall(cache, metrics, server_facts=server_facts, text_facts=text_facts)
    assembler = Assembler(model.files, policies, recall)
    cache.also_flush(assembler.forget)
    return assembler


class AssemblerApplication:
    """The assembler as the server runs it."""

    name = "assembler"
    services: Sequence[str] = (SERVICE, ADMIN_SERVICE)

    def __init__(self, settings: AssemblerSettings, processes: Path | None = None) -> None:
        """processes: the directory that several assemblers on one port share; None where this one is alone."""
        self._settings = settings
        self._processes = processes
        self._endpoint: Endpoint | None = None
        self._cache: AssemblyCache | None = None
        self._assembler: Assembler | None = None
        self._upstream: Upstream | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server, health: server.Health) -> None:
        """Loads the model's tokenizer and template, and begins to look for the executor."""
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.set_threshold(*COLLECT_AT)
        try:
            await self._start(server, health)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, server: grpc.aio.Server, health: server.Health) -> None:
        registry = CollectorRegistry()
        if self._processes is None:  # else the one who started this process has it
            self._endpoint = Endpoint(registry, self._settings.host, self._settings.metrics_port)
            _log.info("metrics on http://%s:%d/metrics", self._settings.host, self._endpoint.port)
        model = await self._load()
        metrics = AssemblerMetrics(model.name, registry, self._processes)
        self._cache = build(self._settings, metrics, self._processes)
        self._assembler = await asyncio.to_thread(assembler_of, self._settings, model, self._cache, metrics)
        formats = await asyncio.to_thread(
            AnswerFormats, model.files, self._settings.tool_calls, self._settings.reasoning
        )
        _log.info("in answers, %s", formats)
        await self._cache.start(_OPEN_SECONDS)
        self._reporting = asyncio.create_task(_report(self._cache, metrics), name="sizes of the cache")
        gc.collect()
        gc.freeze()  # what is loaded stays; looking through it again and again would stall everything
        await health.set(SERVICE, True)
        await health.set(GENERATE, False)

        async def tell_health(usable: bool) -> None:
            await health.set(GENERATE, usable)

        self._upstream = Upstream(
            self._settings.executor,
            model.fingerprint,
            max_message_bytes=int(self._settings.max_message_bytes),
            on_change=tell_health,
        )
        service = AssemblerService(
            self._assembler,
            self._upstream,
            formats,
            model_name=model.name,
            fingerprint=model.fingerprint,
            answer_reserve=self._settings.answer_reserve,
            caches=self._settings.cache,
        )
        assembler_pb2_grpc.add_AssemblerServicer_to_server(service, server)
        admin = AssemblerAdminService(self._cache, metrics, self._assembler)
        assembler_pb2_grpc.add_AssemblerAdminServicer_to_server(admin, server)
        self._upstream.start()

    async def _load(self) -> Model:
        directory = await asyncio.to_thread(models.resolve, self._settings.model)
        files = await asyncio.to_thread(model_files.load, directory.path, self._settings.template)
        fingerprint = await asyncio.to_thread(models.tokenizer_fingerprint, directory.path)
        name = self._settings.model_name or directory.name
        _log.info(
            "serving prompts for %s: %s encodes, %s",
            name,
            files.tokenizer.encodes_with,
            "text prompts only, the model has no chat template" if files.template is None else self._template_name(),
        )
        return Model(name, fingerprint, files)

    def _template_name(self) -> str:
        return "the model's template" if self._settings.template is None else f"template {self._settings.template}"

    async def drain(self) -> None:
        """The server waits for the calls that run; nothing else is left to do."""

    async def stop(self) -> None:
        """Ends the connection to the executor and the working threads; what waits for the disk is written."""
        if self._reporting is not None:
            self._reporting.cancel()
        if self._upstream is not None:
            await self._upstream.close()
        if self._assembler is not None:
            self._assembler.close()
        if self._cache is not None:
            await self._cache.close()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)


async def _report(cache: AssemblyCache, metrics: AssemblerMetrics) -> None:
    while True:
        metrics.sizes(cache.in_memory, cache.on_disk)
        await asyncio.sleep(_REPORT_SECONDS)
