"""The servicer: proto in, pipeline, proto out."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from assembler import packed
from assembler.answer import Answer, joined
from assembler.answer_format import AnswerFormats
from assembler.cache.cache import AssemblyCache
from assembler.causes import Summary
from assembler.detokenizer import StopRule
from assembler.explain import Explainer
from assembler.findings import as_warnings
from assembler.metrics import AssemblerMetrics
from assembler.orders import Assembled, Fitting, Order
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from assembler.tokenizer import TokenIds
from assembler.truncation import Window
from assembler.upstream import Job, Upstream
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, types_pb2
from shared.durations import duration
from shared.errors import HermesError, failed_precondition, invalid_argument

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Request: TypeAlias = (
    assembler_pb2.AssembleRequest | assembler_pb2.AssemblerGenerateRequest | assembler_pb2.ExplainRequest
)

_ROUNDS: Final = assembler_pb2.Truncation.MODE_ROUNDS
_MODES: Final = (assembler_pb2.Truncation.MODE_UNSPECIFIED, assembler_pb2.Truncation.MODE_REJECT, _ROUNDS)
# All of them are looked for in each token's text: 50 µs for so many.
_MOST_STOPS: Final = 64
_MOST_STOP_CHARACTERS: Final = 16_384
# Enough to recognise a mistyped name by.
_QUOTED_CHARACTERS: Final = 100


class AssemblerService(assembler_pb2_grpc.AssemblerServicer):
    """Answers hermes.v1.Assembler."""

    def __init__(
        self,
        assembler: Assembler,
        upstream: Upstream,
        formats: AnswerFormats,
        *,
        model_name: str,
        fingerprint: str,
        answer_reserve: int,
        caches: bool,
    ) -> None:
        """model_name: what callers call the model. fingerprint: the tokenizer's digest.

        answer_reserve: tokens of the context that chats are cut short for. caches: False where nothing is remembered.
        """
        self._assembler = assembler
        self._explainer = Explainer(assembler)
        self._upstream = upstream
        self._formats = formats
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._answer_reserve = answer_reserve
        self._caches = caches

    async def Assemble(
        self, request: assembler_pb2.AssembleRequest, context: Context
    ) -> assembler_pb2.AssembleResponse:
        assembled = await self._assembler.assemble(self._order(request, return_text=request.return_text))
        response = assembler_pb2.AssembleResponse(
            request_id=_request_id(request), text=assembled.text, info=self._info(assembled)
        )
        packed.add(response, "token_ids", assembled.ids)
        return response

    async def Generate(
        self, request: assembler_pb2.AssemblerGenerateRequest, context: Context
    ) -> AsyncIterator[assembler_pb2.AssemblerGenerateResponse]:
        order = self._order(request, return_text=False)
        assembled = await self._assembler.assemble(order)
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
        keeping = self._assembler.keeping(order, assembled)
        at_end = None if keeping is None else keeping.keep
        answer = Answer(self._assembler.files.tokenizer, assembled.ids, rule, head, form, at_end=at_end)
        async with self._upstream.generate(job) as run, aclosing(joined(answer.events(run))) as events:
            async for event in events:
                yield event

    async def Explain(self, request: assembler_pb2.ExplainRequest, context: Context) -> assembler_pb2.ExplainResponse:
        order = self._order(request, return_text=True)
        policy = request.cache

        async def held(ids: TokenIds) -> int | None:
            if policy.HasField("read") and not policy.read:
                return None
            return await self._upstream.held(ids, policy.namespace, context.time_remaining())

        explained = await self._explainer.explain(order, held)
        explained.told.request_id = _request_id(request)
        explained.told.info.CopyFrom(self._info(explained.assembled))
        return explained.told

    def _order(self, request: _Request, *, return_text: bool) -> Order:
        self._check_model(request.model)
        truncation = request.truncation
        max_tokens, fitting = self._limit(truncation), Fitting(asked=str(truncation.max_prompt_tokens))
        if truncation.mode == _ROUNDS and max_tokens is not None:
            window = Window(max_tokens, max(1, truncation.keep_last_rounds))
            fitting = Fitting(window, f"rounds {window.tokens} {window.keep_last_rounds}")
        return Order(request.prompt, max_tokens, return_text, fitting, self._use(request.cache))

    def _use(self, policy: types_pb2.CachePolicy) -> CacheUse:
        read = policy.read if policy.HasField("read") else True
        write = policy.write if policy.HasField("write") else True
        return CacheUse(policy.namespace, read and self._caches, write and self._caches)

    def _check_model(self, name: str) -> None:
        if name and name != self._model_name:
            raise invalid_argument(
                "MODEL_NOT_SERVED",
                f"This server serves {self._model_name}, not {name[:_QUOTED_CHARACTERS]}: name that, or none.",
                model=name,
                served=self._model_name,
            )

    def _limit(self, truncation: assembler_pb2.Truncation) -> int | None:
        """The most tokens that the prompt may have; None for no limit. Raises HermesError BAD_TRUNCATION."""
        if truncation.mode not in _MODES:
            raise _bad_truncation("mode", f"The truncation mode {truncation.mode} is none that this server knows")
        if truncation.keep_last_rounds and truncation.mode != _ROUNDS:
            raise _bad_truncation("keep_last_rounds", "keep_last_rounds is of no use in this mode")
        model = self._upstream.model
        context = _least(self._assembler.files.context_length, model and model.context_length)
        asked = truncation.max_prompt_tokens
        if truncation.mode == _ROUNDS and not asked and context is not None:
            return max(context - self._answer_reserve, context // 2)  # a short context is not all for the answer
        return _least(context, asked)

    def _stop_rule(self, request: assembler_pb2.AssemblerGenerateRequest) -> StopRule:
        if "" in request.stop:
            raise _bad_stopping("A stop string is empty, and would end every answer at once: leave it out.")
        count, characters = len(request.stop), sum(map(len, request.stop))
        if count > _MOST_STOPS or characters > _MOST_STOP_CHARACTERS:
            raise _bad_stopping(
                f"There are {count} stop strings with {characters} characters, but no more than {_MOST_STOPS} with "
                f"{_MOST_STOP_CHARACTERS} are allowed: leave some out."
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
            cached_tokens=assembled.cached_tokens,
            dropped_rounds=assembled.dropped_rounds,
            template_version=assembled.template_version,
            tokenizer_fingerprint=self._fingerprint,
            warnings=as_warnings(assembled.findings),
            timings=types_pb2.Timings(assemble=duration(assembled.seconds)),
        )


class AssemblerAdminService(assembler_pb2_grpc.AssemblerAdminServicer):
    """Answers hermes.v1.AssemblerAdmin."""

    def __init__(self, cache: AssemblyCache, metrics: AssemblerMetrics, assembler: Assembler) -> None:
        self._cache = cache
        self._metrics = metrics
        self._assembler = assembler

    async def GetAssemblyCacheStats(
        self, request: assembler_pb2.GetAssemblyCacheStatsRequest, context: Context
    ) -> assembler_pb2.GetAssemblyCacheStatsResponse:
        self._metrics.sizes(self._cache.in_memory, self._cache.on_disk)
        counts = await asyncio.to_thread(self._metrics.read)
        return assembler_pb2.GetAssemblyCacheStatsResponse(
            lookups=counts.of("lookups_total"),
            memory_hits=counts.of("lookups_total", result="memory"),
            disk_hits=counts.of("lookups_total", result="disk"),
            prefix_hits=counts.of("beginnings_total") - counts.of("beginnings_total", result="miss"),
            tokens=counts.of("prompt_tokens_total"),
            cached_tokens=counts.of("hit_tokens_total"),
            entries=counts.of("disk_entries") or counts.of("memory_entries"),
            disk_bytes=counts.of("disk_bytes"),
            evictions=counts.of("evicted_entries_total"),
            damaged=counts.of("damaged_entries_total"),
            memory_bytes=counts.of("memory_bytes"),
            dropped_writes=counts.of("dropped_writes_total"),
            disk_troubles=counts.of("disk_troubles_total"),
        )

    async def GetInsight(
        self, request: assembler_pb2.GetInsightRequest, context: Context
    ) -> assembler_pb2.GetInsightResponse:
        insight = self._assembler.insight
        if insight is None:
            raise failed_precondition(
                "INSIGHT_OFF", "This server does not look at prompts: set insight = true, and start it again."
            )
        return assembler_pb2.GetInsightResponse(
            namespaces=map(_namespace_insight, insight.summaries(request.namespace or None)),
            rewrites=[each.told for each in self._assembler.chats.rewrites],
        )

    async def FlushAssemblyCache(
        self, request: assembler_pb2.FlushAssemblyCacheRequest, context: Context
    ) -> assembler_pb2.FlushAssemblyCacheResponse:
        removed = await self._cache.flush(request.namespace or None)
        return assembler_pb2.FlushAssemblyCacheResponse(removed=removed)


def _namespace_insight(summary: Summary) -> assembler_pb2.NamespaceInsight:
    now = time.monotonic()
    return assembler_pb2.NamespaceInsight(
        namespace=summary.namespace,
        prompts=summary.prompts,
        causes=[
            assembler_pb2.Cause(
                code=each.kind.code,
                remedy=each.kind.remedy,
                prompts=each.prompts,
                tokens=each.tokens,
                idle=duration(now - each.last),
            )
            for each in summary.causes
        ],
    )


def _request_id(request: _Request) -> str:
    return request.request_id or f"{random.getrandbits(128):032x}"


def _least(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits, where 0 and None are none."""
    return min(one, other) if one and other else one or other or None


def _bad_stopping(problem: str) -> HermesError:
    return invalid_argument("BAD_STOPPING", problem, field="stop")


def _bad_truncation(field: str, problem: str) -> HermesError:
    return invalid_argument("BAD_TRUNCATION", f"{problem}: set mode to MODE_ROUNDS, or leave it out.", field=field)
