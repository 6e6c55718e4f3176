"""The assembler as its server runs it."""

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from typing import Final

import grpc

from assembler import pipeline
from assembler.answer_format import AnswerFormats
from assembler.order import OrderPolicy
from assembler.pipeline import Assembler, Policies
from assembler.service import AssemblerAdminService, AssemblerService
from assembler.upstream import Upstream
from hermes.v1 import assembler_pb2_grpc
from shared import models, server
from shared.config import AssemblerSettings

SERVICE: Final = "hermes.v1.Assembler"
ADMIN_SERVICE: Final = "hermes.v1.AssemblerAdmin"
# Health name that tells whether answers can be had, and not only prompts.
GENERATE: Final = "hermes.v1.Assembler.Generate"

# How long a thread may run on while others wait. Long prompts are worked on beside the event loop, and each time that
# it wants to go on it waits for so long; with Python's own 5 ms a health check takes tens of them.
SWITCH_SECONDS: Final = 0.0005

_log: Final = logging.getLogger(__name__)


class AssemblerApplication:
    """The assembler as the server runs it."""

    name = "assembler"
    services: Sequence[str] = (SERVICE, ADMIN_SERVICE)

    def __init__(self, settings: AssemblerSettings) -> None:
        self._settings = settings
        self._assembler: Assembler | None = None
        self._upstream: Upstream | None = None

    async def start(self, server: grpc.aio.Server, health: server.Health) -> None:
        """Loads the model's tokenizer and template, and begins to look for the executor."""
        sys.setswitchinterval(SWITCH_SECONDS)
        directory = await asyncio.to_thread(models.resolve, self._settings.model)
        files = await asyncio.to_thread(pipeline.load, directory.path, self._settings.template)
        fingerprint = await asyncio.to_thread(models.tokenizer_fingerprint, directory.path)
        name = self._settings.model_name or directory.name
        _log.info(
            "serving prompts for %s: %s encodes, %s",
            name,
            files.tokenizer.library,
            "text prompts only, the model has no chat template" if files.template is None else self._template_name(),
        )
        self._assembler = await asyncio.to_thread(Assembler, files, _policies(self._settings))
        formats = await asyncio.to_thread(AnswerFormats, files, self._settings.tool_calls, self._settings.reasoning)
        _log.info("in answers, %s", formats)
        gc.collect()
        gc.freeze()  # what is loaded stays; looking through it again and again would stall everything
        await health.set(SERVICE, True)
        await health.set(GENERATE, False)

        async def tell_health(usable: bool) -> None:
            await health.set(GENERATE, usable)

        self._upstream = Upstream(
            self._settings.executor,
            fingerprint,
            max_message_bytes=int(self._settings.max_message_bytes),
            on_change=tell_health,
        )
        service = AssemblerService(self._assembler, self._upstream, formats, model_name=name, fingerprint=fingerprint)
        assembler_pb2_grpc.add_AssemblerServicer_to_server(service, server)
        assembler_pb2_grpc.add_AssemblerAdminServicer_to_server(AssemblerAdminService(), server)
        self._upstream.start()

    def _template_name(self) -> str:
        return "the model's template" if self._settings.template is None else f"template {self._settings.template}"

    async def drain(self) -> None:
        """The server waits for the calls that run; nothing else is left to do."""

    async def stop(self) -> None:
        """Ends the connection to the executor and the working threads."""
        if self._upstream is not None:
            await self._upstream.close()
        if self._assembler is not None:
            self._assembler.close()


def _policies(settings: AssemblerSettings) -> Policies:
    return Policies(
        unknown_role=settings.unknown_role,
        order=OrderPolicy(
            merge_system=settings.merge_system,
            merge_same_role=settings.merge_same_role,
            strict=settings.strict,
        ),
        control_text=settings.control_text,
        log_head_tail=settings.log_prompts == "head_tail",
    )
