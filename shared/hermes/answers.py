"""What comes back from a call: answers, their deltas, assembled prompts."""

import time
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from google.protobuf import duration_pb2

from hermes.messages import ToolCall
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import internal

FinishReason = Literal["stop", "length", "tool_calls", "unspecified"]

_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Usage(NamedTuple):
    """Token counts of one request, all samples together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values the executor did not have to compute."""


class Timings(NamedTuple):
    """Seconds, as the services saw them; 0 where none was reported."""

    assemble: float
    queue: float
    prefill: float
    decode: float


class Warning(NamedTuple):  # noqa: A001 - the contract's name
    """What looked wrong with the prompt but did not stop the assembly."""

    code: str
    message: str
    message_index: int | None
    remedy: str = ""
    """A sentence that says what to do."""
    tokens: int = 0
    """Of the prompt, that had to be computed again because of it; an estimate."""
    start: int | None = None
    end: int | None = None
    """The characters of the message's text that it is about, where it is about some."""


class TokenLogprob(NamedTuple):
    """A token and how likely the model held it."""

    token_id: int
    logprob: float
    token: bytes
    top: tuple["TokenLogprob", ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one sample and the tokens it came from."""

    index: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class AssemblyInfo:
    """How a prompt came to be."""

    cached_tokens: int
    """Tokens that the assembler took from its own cache."""
    template_version: str
    tokenizer_fingerprint: str
    dropped_rounds: int
    warnings: tuple[Warning, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Assembled:
    """A prompt as the model reads it."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None
    info: AssemblyInfo


@dataclass(frozen=True, slots=True)
class Sample:
    """One whole answer to the prompt."""

    index: int
    text: str
    reasoning: str
    """What the model thought before it answered, where its template marks that."""
    token_ids: tuple[int, ...]
    """Every token generated, the closing end-of-sequence too."""
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    """The stop string or stop token that ended it, where one did."""
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call to generate brought: one sample, or as many as were asked for."""

    request_id: str
    model: str
    samples: tuple[Sample, ...]
    usage: Usage
    info: AssemblyInfo
    timings: Timings
    time_to_first_token: float | None
    """Seconds from the call to the first token, as the caller saw it; None where no token came."""

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def reasoning(self) -> str:
        """The first sample's reasoning."""
        return self.samples[0].reasoning

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's token ids."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the first sample asked for."""
        return self.samples[0].tool_calls


@dataclass(slots=True)
class _Parts:
    """A sample as far as it has come."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class AnswerBuilder:
    """Puts the events of one call together. Make it when the call begins: the time to the first token counts on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._first_token: float | None = None
        self._started: assembler_pb2.AnswerStarted | None = None
        self._parts: dict[int, _Parts] = {}
        self._finished: dict[int, assembler_pb2.AnswerFinished] = {}
        self._last: assembler_pb2.AnswerFinished | None = None

    def add(self, event: assembler_pb2.AssemblerGenerateResponse) -> Delta | None:
        """Takes the next event; returns its delta where it is one."""
        match event.WhichOneof("event"):
            case "started":
                self._started = event.started
            case "finished":
                self._last = self._finished[event.finished.index] = event.finished
            case "delta":
                return self._add_delta(event.delta)
        return None

    def answer(self) -> Answer:
        """The whole answer. Raises HermesError (BROKEN_STREAM) when the stream ended before the answer did."""
        if self._started is None or self._last is None or self._parts.keys() - self._finished.keys():
            raise internal("BROKEN_STREAM", "The assembler ended the stream before the answer; its log tells why.")
        usage = next((done.usage for done in self._finished.values() if done.HasField("usage")), types_pb2.Usage())
        return Answer(
            request_id=self._started.request_id,
            model=self._started.model,
            samples=tuple(self._sample(index) for index in sorted(self._finished)),
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            info=assembly_info(self._started.info),
            timings=_timings(self._last.timings),
            time_to_first_token=self._first_token,
        )

    def _add_delta(self, delta: assembler_pb2.AnswerDelta) -> Delta:
        if self._first_token is None:
            self._first_token = time.perf_counter() - self._begin
        piece = Delta(
            delta.index, delta.text, delta.reasoning, tuple(delta.token_ids), tuple(map(_logprob, delta.logprobs))
        )
        parts = self._parts.setdefault(delta.index, _Parts())
        parts.text.append(piece.text)
        parts.reasoning.append(piece.reasoning)
        parts.token_ids.extend(piece.token_ids)
        parts.logprobs.extend(piece.logprobs)
        return piece

    def _sample(self, index: int) -> Sample:
        parts, finished = self._parts.get(index, _Parts()), self._finished[index]
        matched: str | int | None = None
        match finished.WhichOneof("matched_stop"):
            case "stop":
                matched = finished.stop
            case "stop_token_id":
                matched = finished.stop_token_id
        return Sample(
            index=index,
            text="".join(parts.text),
            reasoning="".join(parts.reasoning),
            token_ids=tuple(parts.token_ids),
            logprobs=tuple(parts.logprobs),
            finish_reason=_FINISH_REASONS.get(finished.finish_reason, "unspecified"),
            matched_stop=matched,
            tool_calls=tuple(
                ToolCall(call.name, call.arguments_json, call.id if call.HasField("id") else None)
                for call in finished.tool_calls
            ),
        )


def assembled(response: assembler_pb2.AssembleResponse) -> Assembled:
    """The assembled prompt of a response."""
    return Assembled(
        request_id=response.request_id,
        token_ids=tuple(response.token_ids),
        text=response.text if response.HasField("text") else None,
        info=assembly_info(response.info),
    )


def assembly_info(info: assembler_pb2.AssemblyInfo) -> AssemblyInfo:
    """The contract's message as a value."""
    return AssemblyInfo(
        cached_tokens=info.cached_tokens,
        template_version=info.template_version,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        dropped_rounds=info.dropped_rounds,
        warnings=tuple(map(_warning, info.warnings)),
        timings=_timings(info.timings),
    )


def _warning(warning: assembler_pb2.Warning) -> Warning:
    return Warning(
        code=warning.code,
        message=warning.message,
        message_index=warning.message_index if warning.HasField("message_index") else None,
        remedy=warning.remedy,
        tokens=warning.tokens,
        start=warning.start if warning.HasField("start") else None,
        end=warning.end if warning.HasField("end") else None,
    )


def _timings(timings: types_pb2.Timings) -> Timings:
    return Timings(*map(_seconds, (timings.assemble, timings.queue, timings.prefill, timings.decode)))


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _logprob(entry: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.token, tuple(map(_logprob, entry.top)))
