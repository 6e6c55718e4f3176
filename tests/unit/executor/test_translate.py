"""Every check of a request, and whose default counts."""

import math
from typing import Any

import grpc
import pytest

from executor.kv.node import Scope
from executor.model import GenerationDefaults
from executor.requests import Request, Sampling
from executor.translate import Translator
from hermes.v1 import executor_pb2, types_pb2
from shared.errors import HermesError, StartupError

VOCAB, CONTEXT = 100, 32
PROMPT = [1, 2, 3]


def translator(**changes: Any) -> Translator:
    return Translator(
        **{
            "vocab_size": VOCAB,
            "context_length": CONTEXT,
            "max_samples": 8,
            "eos_token_ids": frozenset({2}),
            "defaults": GenerationDefaults(),
            "model_version": "version",
            "tokenizer_fingerprint": "ours",
            **changes,
        }
    )


def start(
    *, sampling: dict[str, Any] | None = None, stopping: dict[str, Any] | None = None, **fields: Any
) -> executor_pb2.ExecutorStart:
    return executor_pb2.ExecutorStart(
        sampling=types_pb2.SamplingParams(**sampling or {}), stopping=types_pb2.StopParams(**stopping or {}), **fields
    )


def translated(defaults: GenerationDefaults | None = None, **fields: Any) -> Request:
    return translator(defaults=defaults or GenerationDefaults()).request(start(**fields), PROMPT)


def refused(prompt: list[int] | None = None, **fields: Any) -> HermesError:
    with pytest.raises(HermesError) as caught:
        translator().request(start(**fields), PROMPT if prompt is None else prompt)
    assert caught.value.message.endswith(".")
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -1.0, "must be 0 (greedy) or more, not -1"),
        ("temperature", math.nan, "not nan"),
        ("temperature", math.inf, "not inf"),
        ("top_p", 0.0, "must be above 0 and at most 1, not 0"),
        ("top_p", 2.0, "must be above 0 and at most 1, not 2"),
        ("top_p", -0.5, "must be above 0"),
        ("top_p", math.nan, "must be above 0"),
        ("min_p", -0.1, "must be from 0 to 1"),
        ("min_p", 1.5, "must be from 0 to 1"),
        ("min_p", math.nan, "must be from 0 to 1"),
        ("repetition_penalty", 0.0, "must be from 0.01 to 100"),
        ("repetition_penalty", -1.0, "must be from 0.01 to 100"),
        ("repetition_penalty", math.inf, "must be from 0.01 to 100"),
        ("presence_penalty", 2.5, "must be from -2 to 2"),
        ("frequency_penalty", -3.0, "must be from -2 to 2"),
        ("frequency_penalty", math.nan, "must be from -2 to 2"),
        ("n", 0, "must be from 1 to 8"),
        ("n", 9, "must be from 1 to 8"),
        ("logprobs", 129, "must be at most 128"),
        ("logit_bias", {5: math.inf}, "must be from -100 to 100"),
        ("logit_bias", {5: math.nan}, "must be from -100 to 100"),
        ("logit_bias", {5: 0.0, 6: -101.0}, "must be from -100 to 100"),
    ],
)
def test_sampling_out_of_range_is_refused(field: str, value: Any, rule: str) -> None:
    error = refused(sampling={field: value})
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_SAMPLING")
    assert error.metadata["field"] == field
    assert error.message.startswith(f"{field} ")
    assert rule in error.message


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 50.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 0},
        {"top_k": 2**32 - 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"n": 1},
        {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}},
        {"allowed_token_ids": [0, VOCAB - 1]},
        {"seed": 2**64 - 1},
    ],
)
def test_the_ends_of_the_ranges_are_taken(sampling: dict[str, Any]) -> None:
    translated(sampling=sampling)


def test_samples_and_log_probabilities_are_none_and_one_unless_asked_for() -> None:
    sampling = translated().sampling
    assert (sampling.samples, sampling.logprobs) == (1, None)
    sampling = translated(sampling={"n": 4, "logprobs": 0}).sampling
    assert (sampling.samples, sampling.logprobs) == (4, 0)


@pytest.mark.parametrize(
    ("field", "stopping"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ],
)
def test_stopping_that_cannot_be_is_refused(field: str, stopping: dict[str, Any]) -> None:
    error = refused(stopping=stopping)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_STOPPING")
    assert error.metadata["field"] == field


@pytest.mark.parametrize(
    ("sampling", "stopping"),
    [
        ({"allowed_token_ids": [2, 7]}, {"stop_token_ids": [7], "min_tokens": 1}),
        ({}, {"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}),
    ],
    ids=["allowed", "vocabulary"],
)
def test_min_tokens_must_leave_a_token_to_choose(sampling: dict[str, Any], stopping: dict[str, Any]) -> None:
    error = refused(sampling=sampling, stopping=stopping)
    assert (error.reason, error.metadata["field"]) == ("BAD_STOPPING", "min_tokens")
    translated(sampling=sampling, stopping={**stopping, "min_tokens": 0})


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt", {"prompt": [1, VOCAB, 3]}),
        ("prompt", {"prompt": [2**32 - 1]}),
        ("logit_bias", {"sampling": {"logit_bias": {VOCAB: 1.0}}}),
        ("allowed_token_ids", {"sampling": {"allowed_token_ids": [1, VOCAB]}}),
        ("stop_token_ids", {"stopping": {"stop_token_ids": [VOCAB]}}),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_wherever_it_stands(field: str, request_fields: Any) -> None:
    error = refused(**request_fields)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY")
    assert error.metadata["field"] == field
    assert error.metadata["vocab_size"] == str(VOCAB)
    assert "0 to 99" in error.message


def test_the_last_token_of_the_vocabulary_is_in_it() -> None:
    assert translator().request(start(), [0, VOCAB - 1]).prompt == (0, VOCAB - 1)


def test_a_prompt_must_have_tokens() -> None:
    assert refused(prompt=[]).reason == "PROMPT_EMPTY"


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    translator().request(start(), [1] * (CONTEXT - 1))
    error = refused(prompt=[1] * CONTEXT)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert error.metadata == {"prompt_tokens": str(CONTEXT), "limit": str(CONTEXT - 1)}


def test_another_tokenizer_is_refused_with_both_fingerprints() -> None:
    with pytest.raises(HermesError) as caught:
        translator().check_tokenizer(start(tokenizer_fingerprint="theirs"))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
    assert caught.value.metadata == {"caller": "theirs", "executor": "ours"}


@pytest.mark.parametrize("fingerprint", ["", "ours"])
def test_the_same_tokenizer_or_none_named_is_taken(fingerprint: str) -> None:
    translator().check_tokenizer(start(tokenizer_fingerprint=fingerprint))


ADVICE = GenerationDefaults(temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.5)


def test_without_advice_the_contracts_defaults_count() -> None:
    sampling = translated().sampling
    assert sampling == Sampling(seed=sampling.seed)


def test_the_models_advice_fills_what_the_caller_left_out() -> None:
    sampling = translated(ADVICE).sampling
    assert sampling == Sampling(
        temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.5, seed=sampling.seed
    )


def test_what_the_caller_sets_counts_even_where_it_is_zero() -> None:
    given = {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    assert translated(ADVICE, sampling=given).sampling == Sampling(temperature=0.0, top_p=0.5, seed=0)


@pytest.mark.parametrize(
    ("advice", "field"),
    [
        (GenerationDefaults(top_p=1.5), "top_p"),
        (GenerationDefaults(top_k=-1), "top_k"),
        (GenerationDefaults(temperature="warm"), "warm"),  # type: ignore[arg-type]
    ],
)
def test_advice_that_no_request_could_follow_stops_the_start(advice: GenerationDefaults, field: str) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json cannot be used.*{field}"):
        translator(defaults=advice)


def test_seeds_are_random_where_none_is_set_and_kept_where_one_is() -> None:
    seeds = {translated().sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert translated(sampling={"seed": 2**64 - 1}).sampling.seed == 2**64 - 1


def test_stop_tokens_are_the_callers_and_the_models_unless_ignored() -> None:
    assert translated(stopping={"stop_token_ids": [7]}).stopping.stop_token_ids == {2, 7}
    assert translated(stopping={"stop_token_ids": [7], "ignore_eos": True}).stopping.stop_token_ids == {7}


def test_limits_are_passed_on() -> None:
    stopping = translated(stopping={"max_tokens": 5, "min_tokens": 5}).stopping
    assert (stopping.max_tokens, stopping.min_tokens) == (5, 5)
    assert translated().stopping.max_tokens is None


def test_biases_and_allowed_tokens_come_in_one_order() -> None:
    sampling = translated(sampling={"logit_bias": {9: 1.0, 3: -2.0}, "allowed_token_ids": [9, 3, 9]}).sampling
    assert sampling.logit_bias == ((3, -2.0), (9, 1.0))
    assert sampling.allowed == (3, 9)


def test_the_cache_is_read_and_written_unless_told_otherwise() -> None:
    request = translated(cache=types_pb2.CachePolicy(namespace="team"), request_id="r1")
    assert (request.read_cache, request.write_cache, request.request_id) == (True, True, "r1")
    assert request.scope == Scope("team", "version", "full")
    request = translated(cache=types_pb2.CachePolicy(read=False, write=False))
    assert (request.read_cache, request.write_cache) == (False, False)


def test_a_prefix_is_a_request_that_generates_nothing() -> None:
    request = translator().prefix(PROMPT, "team")
    assert (request.prompt, request.stopping.max_tokens, request.scope.namespace) == (tuple(PROMPT), 0, "team")
    for bad, reason in (([], "PROMPT_EMPTY"), ([VOCAB], "TOKEN_OUT_OF_VOCABULARY"), ([1] * CONTEXT, "PROMPT_TOO_LONG")):
        with pytest.raises(HermesError) as caught:
            translator().prefix(bad, "")
        assert caught.value.reason == reason
