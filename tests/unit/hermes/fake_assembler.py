"""An assembler that answers what a test tells it to, behind a real gRPC server."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health, health_pb2
from grpc_status import rpc_status

from hermes.v1 import assembler_pb2, assembler_pb2_grpc, types_pb2
from shared.errors import HermesError

Event = assembler_pb2.AssemblerGenerateResponse
Request = assembler_pb2.AssemblerGenerateRequest | assembler_pb2.AssembleRequest | assembler_pb2.ExplainRequest


def started(prompt_tokens: int = 9, cached_tokens: int = 4, warnings: tuple[str, ...] = ()) -> Event:
    info = assembler_pb2.AssemblyInfo(
        cached_tokens=5, template_version="t1", warnings=[assembler_pb2.Warning(code=w, message=w) for w in warnings]
    )
    return Event(
        started=assembler_pb2.AnswerStarted(
            request_id="r1", model="fake", prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, info=info
        )
    )


def delta(text: str, *token_ids: int, index: int = 0, reasoning: str = "") -> Event:
    return Event(delta=assembler_pb2.AnswerDelta(index=index, text=text, token_ids=token_ids, reasoning=reasoning))


def finished(index: int = 0, **fields: object) -> Event:
    fields.setdefault("finish_reason", types_pb2.FINISH_REASON_STOP)
    done = assembler_pb2.AnswerFinished(index=index, **fields)
    return Event(finished=done)


def usage(prompt: int = 9, completion: int = 2, cached: int = 4) -> types_pb2.Usage:
    return types_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


PARIS = [
    started(),
    delta("Par", 10),
    delta("is.", 11, 2),
    finished(
        stop_token_id=2, usage=usage(completion=3), timings=types_pb2.Timings(prefill=Duration(nanos=250_000_000))
    ),
]


CALLING = [
    started(),
    delta("", 5, 6, reasoning="I do not"),
    delta("", 7, reasoning=" know."),
    delta("Let me see.", 10),
    delta("", 11, 2),
    finished(
        finish_reason=types_pb2.FINISH_REASON_TOOL_CALLS,
        stop_token_id=2,
        usage=usage(completion=6),
        tool_calls=[types_pb2.ToolCall(id="abcdefghi", name="find", arguments_json='{"q": "é"}')],
    ),
]


@dataclass
class FakeAssembler(assembler_pb2_grpc.AssemblerServicer, assembler_pb2_grpc.AssemblerAdminServicer):
    """Sends `events`, then what `then` says: ends, fails with it, or waits until the caller goes away."""

    events: list[Event] = field(default_factory=lambda: list(PARIS))
    error: HermesError | None = None
    hold: bool = False
    requests: list[Request] = field(default_factory=list)
    explained: assembler_pb2.ExplainResponse = field(default_factory=assembler_pb2.ExplainResponse)
    flushes: list[str] = field(default_factory=list)
    insights: list[str] = field(default_factory=list)
    insight: assembler_pb2.GetInsightResponse = field(default_factory=assembler_pb2.GetInsightResponse)
    gone: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    states: health.HealthServicer = field(default_factory=health.HealthServicer)

    def Generate(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.AssemblerGenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[Event]:
        self.requests.append(request)
        context.add_callback(self.gone.set)
        yield from self.events
        self._fail(context)
        if self.hold:
            self.gone.wait()

    def Assemble(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.AssembleRequest, context: grpc.ServicerContext
    ) -> assembler_pb2.AssembleResponse:
        self.requests.append(request)
        self._fail(context)
        text = "<|im_start|>" if request.return_text else None
        return assembler_pb2.AssembleResponse(request_id="r1", token_ids=[1, 4093, 198], text=text)

    def Explain(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> assembler_pb2.ExplainResponse:
        self.requests.append(request)
        self._fail(context)
        return self.explained

    def GetAssemblyCacheStats(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.GetAssemblyCacheStatsRequest, context: grpc.ServicerContext
    ) -> assembler_pb2.GetAssemblyCacheStatsResponse:
        self._fail(context)
        return assembler_pb2.GetAssemblyCacheStatsResponse(lookups=3, memory_hits=1, tokens=200, cached_tokens=150)

    def GetInsight(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.GetInsightRequest, context: grpc.ServicerContext
    ) -> assembler_pb2.GetInsightResponse:
        self._fail(context)
        self.insights.append(request.namespace)
        return self.insight

    def FlushAssemblyCache(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.FlushAssemblyCacheRequest, context: grpc.ServicerContext
    ) -> assembler_pb2.FlushAssemblyCacheResponse:
        self.flushes.append(request.namespace)
        self._fail(context)
        return assembler_pb2.FlushAssemblyCacheResponse(removed=5)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error.status()))

    def set_health(self, service: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.states.set(service, status.SERVING if serving else status.NOT_SERVING)
