"""The contract's requests as the engine's; every check of a request stands here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence

from executor.kv.node import Scope
from executor.model import GenerationDefaults
from executor.requests import Request, Sampling, Stopping
from hermes.v1 import executor_pb2, types_pb2
from shared.errors import HermesError, StartupError, failed_precondition, invalid_argument

_MAX_LOGPROBS = 128  # far more than anybody reads, and a message that stays small
_MAX_PENALTY = 2.0  # the range that chat APIs give presence and frequency penalties
_MAX_BIAS = 100.0  # and to biases; it bans or forces a token, and stays far from what overflows
_REPETITION = (0.01, 100.0)  # beyond this a penalty means nothing, and may overflow


class Translator:
    """Checks requests against one model and fills in its defaults."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        max_samples: int,
        eos_token_ids: frozenset[int],
        defaults: GenerationDefaults,
        model_version: str,
        tokenizer_fingerprint: str,
    ) -> None:
        """Raises StartupError for defaults that no request could be answered with."""
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_samples = max_samples
        self._eos_token_ids = eos_token_ids
        self._defaults = defaults
        self._model_version = model_version
        self._tokenizer_fingerprint = tokenizer_fingerprint
        try:
            self._sampling(types_pb2.SamplingParams())
        except (HermesError, TypeError, ValueError) as error:
            said = error.message if isinstance(error, HermesError) else str(error)
            raise StartupError(f"The model's generation_config.json cannot be used; correct it: {said}") from error

    def check_tokenizer(self, start: executor_pb2.ExecutorStart) -> None:
        """Refuses ids of another tokenizer. Raises HermesError with FAILED_PRECONDITION."""
        theirs = start.tokenizer_fingerprint
        if theirs and theirs != self._tokenizer_fingerprint:
            raise failed_precondition(
                "TOKENIZER_MISMATCH",
                f"The caller's tokenizer is {theirs}, this model's {self._tokenizer_fingerprint}; use the same files.",
                caller=theirs,
                executor=self._tokenizer_fingerprint,
            )

    def check_length(self, tokens: int) -> None:
        """Refuses a prompt that leaves no room for a token of answer. Raises HermesError."""
        if tokens >= self._context_length:
            raise invalid_argument(
                "PROMPT_TOO_LONG",
                f"The prompt has {tokens} tokens or more, but the model's context takes {self._context_length} with the"
                " answer; shorten the prompt.",
                prompt_tokens=str(tokens),
                limit=str(self._context_length - 1),
            )

    def request(self, start: executor_pb2.ExecutorStart, prompt: list[int]) -> Request:
        """The engine's request. Raises HermesError with INVALID_ARGUMENT and a sentence."""
        self._check_prompt(prompt)
        sampling, stopping = self._sampling(start.sampling), self._stopping(start.stopping)
        choices = sampling.allowed or range(self._vocab_size)
        if stopping.min_tokens and stopping.stop_token_ids.issuperset(choices):
            raise _bad("STOPPING", "min_tokens", "needs a token that may be chosen and does not end the answer")
        policy = start.cache
        return Request(
            prompt=tuple(prompt),
            sampling=sampling,
            stopping=stopping,
            scope=self.scope(policy.namespace),
            read_cache=policy.read if policy.HasField("read") else True,
            write_cache=policy.write if policy.HasField("write") else True,
            request_id=start.request_id,
        )

    def scope(self, namespace: str) -> Scope:
        """Whose blocks a request may share."""
        return Scope(namespace, self._model_version, "full")

    def prefix(self, token_ids: Sequence[int], namespace: str) -> Request:
        """A request that computes a prefix and generates nothing. Raises HermesError with INVALID_ARGUMENT."""
        self._check_prompt(token_ids)
        stopping = Stopping(max_tokens=0)
        return Request(tuple(token_ids), Sampling(), stopping, self.scope(namespace))

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise invalid_argument("PROMPT_EMPTY", "The prompt has no tokens; send at least one.")
        self.check_length(len(token_ids))
        self._check_ids("prompt", token_ids)

    def _sampling(self, params: types_pb2.SamplingParams) -> Sampling:
        if params.HasField("n") and not 1 <= params.n <= self._max_samples:
            raise _bad("SAMPLING", "n", f"must be from 1 to {self._max_samples}, not {params.n}")
        if params.logprobs > _MAX_LOGPROBS:
            raise _bad("SAMPLING", "logprobs", f"must be at most {_MAX_LOGPROBS}, not {params.logprobs}")
        given = self._defaults
        sampling = Sampling(
            temperature=_first(params, "temperature", given.temperature, 1.0),
            top_p=_first(params, "top_p", given.top_p, 1.0),
            top_k=int(_first(params, "top_k", given.top_k, 0)),
            min_p=_first(params, "min_p", given.min_p, 0.0),
            repetition_penalty=_first(params, "repetition_penalty", given.repetition_penalty, 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed if params.HasField("seed") else secrets.randbits(64),
            samples=params.n if params.HasField("n") else 1,
            logprobs=params.logprobs if params.HasField("logprobs") else None,
            logit_bias=tuple(sorted(params.logit_bias.items())),
            allowed=tuple(sorted(set(params.allowed_token_ids))),
        )
        _check(sampling)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", sampling.allowed)
        return sampling

    def _stopping(self, params: types_pb2.StopParams) -> Stopping:
        if params.HasField("max_tokens") and params.max_tokens == 0:
            raise _bad("STOPPING", "max_tokens", "must be 1 or more, not 0")
        max_tokens = params.max_tokens if params.HasField("max_tokens") else None
        if max_tokens is not None and params.min_tokens > max_tokens:
            raise _bad("STOPPING", "min_tokens", f"is {params.min_tokens}, above max_tokens {max_tokens}")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        own = frozenset() if params.ignore_eos else self._eos_token_ids
        return Stopping(frozenset(params.stop_token_ids) | own, max_tokens, params.min_tokens)

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise invalid_argument(
                "TOKEN_OUT_OF_VOCABULARY",
                f"{field} holds the token id {largest}, but the model knows 0 to {self._vocab_size - 1}.",
                field=field,
                token_id=str(largest),
                vocab_size=str(self._vocab_size),
            )


def _first(params: types_pb2.SamplingParams, name: str, model_default: float | None, default: float) -> float:
    """What the caller set, else what the model's makers recommend, else the contract's default."""
    if params.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
        return float(getattr(params, name))
    return default if model_default is None else float(model_default)  # a file may hold anything


def _check(sampling: Sampling) -> None:
    _range("temperature", sampling.temperature, sampling.temperature >= 0, "must be 0 (greedy) or more")
    _range("top_k", sampling.top_k, sampling.top_k >= 0, "must be 0 (the whole vocabulary) or more")
    _range("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "must be above 0 and at most 1")
    _range("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "must be from 0 to 1")
    least, most = _REPETITION
    penalty = sampling.repetition_penalty
    _range("repetition_penalty", penalty, least <= penalty <= most, f"must be from {least:g} to {most:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _range(name, value, abs(value) <= _MAX_PENALTY, "must be from -2 to 2")
    for _, bias in sampling.logit_bias:
        _range("logit_bias", bias, abs(bias) <= _MAX_BIAS, "must be from -100 to 100")


def _range(field: str, value: float, within: bool, rule: str) -> None:
    if not (within and math.isfinite(value)):
        raise _bad("SAMPLING", field, f"{rule}, not {value:g}")


def _bad(what: str, field: str, rule: str) -> HermesError:
    return invalid_argument(f"BAD_{what}", f"{field} {rule}.", field=field)
