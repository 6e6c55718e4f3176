"""The servicer: proto in, pipeline, proto out."""

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import duration_pb2

from assembler.answer import Answer, joined
from assembler.answer_format import AnswerFormats
from assembler.detokenizer import StopRule
from assembler.findings import as_warnings
from assembler.pipeline import Assembled, Assembler, Order
from assembler.upstream import Job, Upstream
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, types_pb2
from shared.errors import HermesError, invalid_argument, unimplemented

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Request: TypeAlias = assembler_pb2.AssembleRequest | assembler_pb2.AssemblerGenerateRequest

_REJECTING: Final = (assembler_pb2.Truncation.MODE_UNSPECIFIED, assembler_pb2.Truncation.MODE_REJECT)
# Enough to recognise a mistyped name by.
_QUOTED_CHARACTERS: Final = 100


class AssemblerService(assembler_pb2_grpc.AssemblerServicer):
    """Answers hermes.v1.Assembler."""

    def __init__(
        self, assembler: Assembler, upstream: Upstream, formats: AnswerFormats, *, model_name: str, fingerprint: str
    ) -> None:
        """model_name: what callers call the model. fingerprint: the tokenizer's digest."""
        self._assembler = assembler
        self._upstream = upstream
        self._formats = formats
        self._model_name = model_name
        self._fingerprint = fingerprint

    async def Assemble(
        self, request: assembler_pb2.AssembleRequest, context: Context
    ) -> assembler_pb2.AssembleResponse:
        assembled = await self._assembler.assemble(self._order(request, return_text=request.return_text))
        return assembler_pb2.AssembleResponse(
            request_id=_request_id(request),
            token_ids=assembled.ids,
            text=assembled.text,
            info=self._info(assembled),
        )

    async def Generate(
        self, request: assembler_pb2.AssemblerGenerateRequest, context: Context
    ) -> AsyncIterator[assembler_pb2.AssemblerGenerateResponse]:
        assembled = await self._assembler.assemble(self._order(request, return_text=False))
        rule = self._stop_rule(request)
        request_id = _request_id(request)
        job = Job(
            request_id=request_id,
            ids=assembled.ids,
            sampling=request.sampling,
            stopping=request.stopping,
            cache=request.cache,
            seconds=context.time_remaining(),
        )
        head = assembler_pb2.AnswerStarted(request_id=request_id, model=self._model_name, info=self._info(assembled))
        form = self._formats.of(request.prompt, assembled.ids)
        answer = Answer(self._assembler.files.tokenizer, assembled.ids, rule, head, form)
        async with self._upstream.generate(job) as run, aclosing(joined(answer.events(run))) as events:
            async for event in events:
                yield event

    async def Explain(self, request: assembler_pb2.ExplainRequest, context: Context) -> assembler_pb2.ExplainResponse:
        raise _not_yet("Explain")

    def _order(self, request: _Request, *, return_text: bool) -> Order:
        self._check_model(request.model)
        return Order(request.prompt, self._max_tokens(request.truncation), return_text)

    def _check_model(self, name: str) -> None:
        if name and name != self._model_name:
            raise invalid_argument(
                "MODEL_NOT_SERVED",
                f"This server serves {self._model_name}, not {name[:_QUOTED_CHARACTERS]}: name that, or none.",
                model=name,
                served=self._model_name,
            )

    def _max_tokens(self, truncation: assembler_pb2.Truncation) -> int | None:
        """The most tokens that the prompt may have. Raises HermesError for truncation that is not there yet."""
        if truncation.mode not in _REJECTING:
            raise _not_yet("truncation.mode MODE_ROUNDS")
        if truncation.keep_last_rounds:
            raise _not_yet("truncation.keep_last_rounds")
        model = self._upstream.model
        limits = (self._assembler.files.context_length, model and model.context_length, truncation.max_prompt_tokens)
        return min((limit for limit in limits if limit), default=None)

    def _stop_rule(self, request: assembler_pb2.AssemblerGenerateRequest) -> StopRule:
        if "" in request.stop:
            raise invalid_argument(
                "BAD_STOPPING",
                "A stop string is empty, and would end every answer at once: leave it out.",
                field="stop",
            )
        model = self._upstream.model
        ends = () if model is None or request.stopping.ignore_eos else model.eos_token_ids
        return StopRule(
            stops=tuple(request.stop),
            include_stop=request.include_stop,
            min_tokens=request.stopping.min_tokens,
            hidden=frozenset((*ends, *request.stopping.stop_token_ids)),
        )

    def _info(self, assembled: Assembled) -> assembler_pb2.AssemblyInfo:
        return assembler_pb2.AssemblyInfo(
            template_version=assembled.template_version,
            tokenizer_fingerprint=self._fingerprint,
            warnings=as_warnings(assembled.findings),
            timings=types_pb2.Timings(assemble=_duration(assembled.seconds)),
        )


class AssemblerAdminService(assembler_pb2_grpc.AssemblerAdminServicer):
    """Answers hermes.v1.AssemblerAdmin."""

    async def GetAssemblyCacheStats(
        self, request: assembler_pb2.GetAssemblyCacheStatsRequest, context: Context
    ) -> assembler_pb2.GetAssemblyCacheStatsResponse:
        raise _not_yet("GetAssemblyCacheStats")

    async def FlushAssemblyCache(
        self, request: assembler_pb2.FlushAssemblyCacheRequest, context: Context
    ) -> assembler_pb2.FlushAssemblyCacheResponse:
        raise _not_yet("FlushAssemblyCache")


def _request_id(request: _Request) -> str:
    return request.request_id or uuid.uuid4().hex


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def _not_yet(what: str) -> HermesError:
    return unimplemented("NOT_SUPPORTED_YET", f"This server does not support {what} yet.", field=what)
