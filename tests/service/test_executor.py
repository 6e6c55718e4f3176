"""The executor as a process of its own, with the real model, asked as an assembler would ask."""

import re
import threading
import time
from collections.abc import Iterable, Iterator

import grpc
import pytest
import torch
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor import linears
from hermes.v1 import executor_pb2 as pb
from hermes.v1 import executor_pb2_grpc, types_pb2
from shared.models import tokenizer_fingerprint
from tests.service.services import EXACT, ServiceProcess, told

GREEDY = types_pb2.SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def executor(model_directory) -> Iterator[ServiceProcess]:
    flags = ("--kv-memory", "512MiB", "--prompt-timeout-seconds", "2")
    process = ServiceProcess("executor", "--model", str(model_directory), *flags, *EXACT)
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def stub(executor) -> Iterator[executor_pb2_grpc.ExecutorStub]:
    with executor.channel() as channel:
        yield executor_pb2_grpc.ExecutorStub(channel)


@pytest.fixture(scope="module")
def reference(model_directory):
    return transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()


def start(ids: Iterable[int], *, end: bool = True, **fields) -> pb.ExecutorGenerateRequest:
    fields = {"sampling": GREEDY, "stopping": types_pb2.StopParams(max_tokens=8, ignore_eos=True)} | fields
    return pb.ExecutorGenerateRequest(
        start=pb.ExecutorStart(tokens=pb.TokenChunk(token_ids=ids, end_of_prompt=end), **fields)
    )


def part(ids: Iterable[int], *, end: bool = False) -> pb.ExecutorGenerateRequest:
    return pb.ExecutorGenerateRequest(tokens=pb.TokenChunk(token_ids=ids, end_of_prompt=end))


def answer(stub, *requests: pb.ExecutorGenerateRequest) -> tuple[list[int], pb.ExecutionFinished, int]:
    """The ids, the closing event, and the cached tokens of one call."""
    events = list(stub.Generate(iter(requests), timeout=120))
    assert [event.WhichOneof("event") for event in events][:: len(events) - 1] == ["started", "finished"]
    ids = [token for event in events for token in event.delta.token_ids]
    return ids, events[-1].finished, events[0].started.cached_tokens


def refusal(stub, *requests: pb.ExecutorGenerateRequest):
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(iter(requests), timeout=60))
    return told(error.value)


def words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 49152, (count,), generator=generator).tolist()


def test_the_log_tells_whose_attention_decodes(executor):
    assert executor.address
    (line,) = [line for line in executor.log if "native" in line][:1]
    assert re.search(r"attention: (native \(AVX|torch's own, since)|building the native", line)


LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 200, 256, 400, 511, 513, 1500)


@pytest.mark.timeout(900)  # what takes so long is the reference
def test_greedy_ids_equal_transformers_generate_for_20_prompts_of_1_to_1500_tokens(stub, reference):
    prompts = [words(length, seed=length) for length in LENGTHS]
    for prompt in prompts:
        ids, finished, _ = answer(stub, start(prompt))
        with torch.inference_mode():
            tensor = torch.tensor([prompt])
            expected = reference.generate(
                tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
        assert ids == expected[0, len(prompt) :].tolist(), f"a prompt of {len(prompt)} tokens"
        assert finished.usage.prompt_tokens == len(prompt)
        assert finished.usage.completion_tokens == 8
        assert finished.finish_reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.skipif(not linears.available(), reason="this CPU has no linears with packed weights")
def test_packed_linears_hold_tokens_as_likely_as_transformers_does(model_directory, reference):
    process = ServiceProcess(
        "executor", "--model", str(model_directory), "--kv-memory", "128MiB", "--cpu-linear", "fp16"
    )
    head = words(200, seed=70)  # more rows than are packed, then few
    with process.channel() as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).cpu_linear == "fp16"
        for prompt in (head + words(5, seed=71), head + words(7, seed=72)):
            sampling = types_pb2.SamplingParams(temperature=0, logprobs=1)
            ids, told_logprobs = [], []
            for event in stub.Generate(iter([start(prompt, sampling=sampling)]), timeout=120):
                ids += event.delta.token_ids
                told_logprobs += [each.logprob for each in event.delta.logprobs]
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(told_logprobs), expected, atol=2e-2, rtol=0)
    assert process.stop() == 0


def test_answers_of_prompts_sent_at_once_are_those_of_prompts_sent_alone(stub):
    prompts = [words(30 + 7 * index, seed=50 + index) for index in range(6)]
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.__setitem__(i, answer(stub, start(prompts[i]))[0]))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(prompts):
        fresh = types_pb2.CachePolicy(namespace=f"alone-{index}")
        assert answers[index] == answer(stub, start(prompt, cache=fresh))[0]


def test_the_second_turn_of_a_chat_computes_only_what_is_new(stub):
    question = words(301, seed=1)  # with the answer 308 tokens: whole blocks, and four rows, just worth a copy
    ids, _, _ = answer(stub, start(question))
    follow_up = question + ids + words(40, seed=2)
    _, finished, cached = answer(stub, start(follow_up))
    assert cached == finished.usage.cached_tokens == len(question) + len(ids) - 1


def test_a_prompt_may_come_in_parts(stub):
    prompt = words(100, seed=3)
    whole, _, _ = answer(stub, start(prompt, cache=types_pb2.CachePolicy(namespace="whole")))
    parts = start(prompt[:10], end=False), part(prompt[10:11]), part([]), part(prompt[11:], end=True)
    assert answer(stub, *parts)[0] == whole
    assert answer(stub, start([], end=False), part(prompt), part([], end=True))[0] == whole


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(stub):
    prompt = words(20, seed=4)

    def drawn(seed: int) -> list[int]:
        sampling = types_pb2.SamplingParams(temperature=1.2, top_k=100, top_p=0.98, seed=seed)
        return answer(stub, start(prompt, sampling=sampling))[0]

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_models_end_of_sequence_ends_an_answer_unless_it_is_ignored(stub):
    forced = types_pb2.SamplingParams(temperature=0, allowed_token_ids=[2])
    prompt = words(5, seed=5)
    ids, finished, _ = answer(stub, start(prompt, sampling=forced, stopping=types_pb2.StopParams(max_tokens=5)))
    assert (ids, finished.finish_reason, finished.stop_token_id) == ([2], types_pb2.FINISH_REASON_STOP, 2)
    ignoring = types_pb2.StopParams(max_tokens=5, ignore_eos=True)
    ids, finished, _ = answer(stub, start(prompt, sampling=forced, stopping=ignoring))
    assert (ids, finished.finish_reason) == ([2] * 5, types_pb2.FINISH_REASON_LENGTH)


def test_stop_sample_ends_an_answer(stub):
    asked, go = threading.Event(), threading.Event()

    def requests() -> Iterator[pb.ExecutorGenerateRequest]:
        yield start(words(5, seed=6), stopping=types_pb2.StopParams(max_tokens=4000, ignore_eos=True))
        asked.set()
        go.wait(60)
        yield pb.ExecutorGenerateRequest(stop=pb.StopSample(index=0))

    finished = None
    for event in stub.Generate(requests(), timeout=120):
        if event.WhichOneof("event") == "delta":
            go.set()
        if event.WhichOneof("event") == "finished":
            finished = event.finished
    assert finished is not None
    assert finished.finish_reason == types_pb2.FINISH_REASON_STOP
    assert not finished.HasField("stop_token_id")
    assert finished.usage.completion_tokens < 4000


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling": {"temperature": -1}}, "BAD_SAMPLING"),
        ({"sampling": {"temperature": float("nan")}}, "BAD_SAMPLING"),
        ({"sampling": {"top_p": 0}}, "BAD_SAMPLING"),
        ({"sampling": {"top_p": 2}}, "BAD_SAMPLING"),
        ({"sampling": {"min_p": 1.5}}, "BAD_SAMPLING"),
        ({"sampling": {"repetition_penalty": 0}}, "BAD_SAMPLING"),
        ({"sampling": {"n": 0}}, "BAD_SAMPLING"),
        ({"sampling": {"logit_bias": {49152: 1.0}}}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"sampling": {"allowed_token_ids": [10**6]}}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"stopping": {"max_tokens": 0}}, "BAD_STOPPING"),
        ({"stopping": {"max_tokens": 2, "min_tokens": 3}}, "BAD_STOPPING"),
        ({"stopping": {"stop_token_ids": [49152]}}, "TOKEN_OUT_OF_VOCABULARY"),
    ],
)
def test_bad_parameters_are_invalid_arguments(stub, fields, reason):
    kinds = {"sampling": types_pb2.SamplingParams, "stopping": types_pb2.StopParams}
    said = refusal(stub, start([100, 200], **{name: kinds[name](**value) for name, value in fields.items()}))
    assert (said.code, said.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert said.message.endswith(".")


def test_samples_stream_by_index_and_one_can_be_stopped(stub):
    go = threading.Event()
    sampling = types_pb2.SamplingParams(temperature=1, seed=3, n=3)

    def requests() -> Iterator[pb.ExecutorGenerateRequest]:
        yield start(words(40, seed=9), sampling=sampling, stopping=types_pb2.StopParams(max_tokens=60, ignore_eos=True))
        go.wait(60)
        yield pb.ExecutorGenerateRequest(stop=pb.StopSample(index=1))

    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ends = {}
    for event in stub.Generate(requests(), timeout=120):
        if event.HasField("delta"):
            ids[event.delta.index] += event.delta.token_ids
            go.set()
        if event.HasField("finished"):
            ends[event.finished.index] = event.finished
    assert [len(ids[0]), len(ids[2])] == [60, 60]
    assert len(ids[1]) < 60
    assert ends[1].finish_reason == types_pb2.FINISH_REASON_STOP
    assert ids[0] != ids[2]
    usages = [end.usage.completion_tokens for end in ends.values() if end.HasField("usage")]
    assert usages == [sum(map(len, ids.values()))]
    said = refusal(stub, start([100], stopping=types_pb2.StopParams(max_tokens=500)), _stop(1))
    assert said.reason == "NO_SUCH_SAMPLE"


def _stop(index: int) -> pb.ExecutorGenerateRequest:
    return pb.ExecutorGenerateRequest(stop=pb.StopSample(index=index))


def test_log_probabilities_equal_those_of_transformers(stub, reference):
    prompt = words(30, seed=10)
    sampling = types_pb2.SamplingParams(temperature=0, logprobs=3, repetition_penalty=1.2)
    events = list(stub.Generate(iter([start(prompt, sampling=sampling)]), timeout=120))
    ids = [token for event in events for token in event.delta.token_ids]
    told = [logprob for event in events for logprob in event.delta.logprobs]
    assert [each.token_id for each in told] == ids
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, each in zip(expected, told, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-3)
        assert [top.token_id for top in each.top] == row.topk(3).indices.tolist()


def test_bad_prompts_are_invalid_arguments(stub):
    assert refusal(stub, start([])).reason == "PROMPT_EMPTY"
    assert refusal(stub, start([1, 49152])).reason == "TOKEN_OUT_OF_VOCABULARY"
    assert refusal(stub, start([2**32 - 1])).reason == "TOKEN_OUT_OF_VOCABULARY"
    said = refusal(stub, start([100] * 8192))
    assert (said.code, said.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert "8192" in said.message
    assert refusal(stub, *[start([100] * 8000, end=False), part([100] * 8000)] * 1).reason == "PROMPT_TOO_LONG"


def test_a_stream_out_of_order_is_an_invalid_argument(stub):
    assert refusal(stub).reason == "BAD_STREAM_ORDER"
    assert refusal(stub, part([1], end=True)).reason == "BAD_STREAM_ORDER"
    assert refusal(stub, start([1], end=False), start([2])).reason == "BAD_STREAM_ORDER"
    assert refusal(stub, start([1], end=False)).reason == "PROMPT_NOT_ENDED"
    said = refusal(stub, start(words(5, seed=7), stopping=types_pb2.StopParams(max_tokens=2000)), part([1]))
    assert (said.code, said.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_STREAM_ORDER")


def test_a_prompt_that_does_not_arrive_in_time_is_a_deadline_exceeded(stub):
    done = threading.Event()

    def requests() -> Iterator[pb.ExecutorGenerateRequest]:
        yield start([1], end=False)
        done.wait(60)

    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(requests(), timeout=60))
    done.set()
    assert told(error.value)[:2] == (grpc.StatusCode.DEADLINE_EXCEEDED, "PROMPT_TIMEOUT")


def test_another_tokenizer_is_refused_with_both_fingerprints(stub, model_directory):
    said = refusal(stub, start([100], tokenizer_fingerprint="f" * 64))
    assert (said.code, said.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
    assert tokenizer_fingerprint(model_directory) in said.message
    assert "f" * 64 in said.message
    answer(stub, start([100], tokenizer_fingerprint=tokenizer_fingerprint(model_directory)))


def test_the_model_is_described(stub, model_directory):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.context_length, list(info.eos_token_ids)) == (
        "SmolLM2-135M-Instruct", 49152, 8192, [2],
    )  # fmt: skip
    assert info.tokenizer_fingerprint == tokenizer_fingerprint(model_directory)
    assert len(info.model_version) == 64
    assert (info.block_size, info.kv_bytes_per_token) == (16, 2 * 30 * 3 * 64 * 4)
    assert (info.device, info.dtype, info.cpu_linear) == ("cpu", "float32", "dense")


def _idle(stub) -> pb.GetLoadResponse:
    """The load once nothing runs any more, which must come soon after the last caller left."""
    for _ in range(200):
        load = stub.GetLoad(pb.GetLoadRequest())
        if not load.running_requests and not load.waiting_requests:
            return load
        time.sleep(0.05)
    pytest.fail(f"still busy: {load}")


def test_a_caller_who_leaves_frees_what_the_request_held(stub):
    call = stub.Generate(iter([start(words(50, seed=8), stopping=types_pb2.StopParams(ignore_eos=True))]))
    assert next(call).WhichOneof("event") == "started"
    next(call)
    assert stub.GetLoad(pb.GetLoadRequest()).running_requests == 1
    call.cancel()
    load = _idle(stub)
    assert load.kv_blocks_active == 0
    assert load.kv_blocks_cached > 0


def test_a_deadline_that_passes_ends_the_request(stub):
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(iter([start([100], stopping=types_pb2.StopParams(ignore_eos=True))]), timeout=1))
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert _idle(stub).kv_blocks_active == 0


@pytest.fixture(scope="module")
def admin(executor) -> Iterator[executor_pb2_grpc.ExecutorAdminStub]:
    with executor.channel() as channel:
        yield executor_pb2_grpc.ExecutorAdminStub(channel)


def test_a_warmed_prefix_is_hit_by_the_first_request(stub, admin):
    prefix, namespace = words(100, seed=20), "warmed"
    policy = types_pb2.CachePolicy(namespace=namespace)
    assert stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=prefix, namespace=namespace)).cached_tokens == 0
    warmed = admin.WarmPrefix(pb.WarmPrefixRequest(token_ids=prefix, namespace=namespace))
    assert (warmed.cached_tokens, warmed.computed_tokens, warmed.pin_id) == (0, 100, "")
    again = admin.WarmPrefix(pb.WarmPrefixRequest(token_ids=prefix, namespace=namespace))
    assert (again.cached_tokens, again.computed_tokens) == (100, 0)
    for length in (1, 3, 97, 98, 99):  # the last tokens fill too little of a block to be worth keeping
        request = pb.WarmPrefixRequest(token_ids=words(length, seed=30), namespace="odd")
        assert admin.WarmPrefix(request).computed_tokens >= (1 if length < 4 else 0)
    request.pin.FromSeconds(60)
    admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=admin.WarmPrefix(request).pin_id))
    longer = [*prefix, *words(5, seed=21)]
    assert stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=longer, namespace=namespace)).cached_tokens == 100
    assert stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=longer, namespace="other")).cached_tokens == 0
    assert answer(stub, start(longer, cache=policy))[2] == 100


def test_a_pinned_prefix_outlives_what_evicts_all_else_until_it_is_unpinned(stub, admin):
    prefix = words(200, seed=22)
    request = pb.WarmPrefixRequest(token_ids=prefix, namespace="pinned")
    request.pin.FromSeconds(600)
    pin = admin.WarmPrefix(request).pin_id
    assert stub.GetLoad(pb.GetLoadRequest()).kv_blocks_pinned == 13
    (branch,) = admin.DescribeTree(pb.DescribeTreeRequest(namespace="pinned")).branches
    assert (branch.tokens, branch.pinned, branch.namespace, branch.start) == (200, True, "pinned", 0)
    assert not branch.head_token_ids, "prompts are shown only where the settings say so"
    admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin))
    assert stub.GetLoad(pb.GetLoadRequest()).kv_blocks_pinned == 0
    with pytest.raises(grpc.RpcError) as error:
        admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin))
    assert told(error.value)[:2] == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_PIN")


def test_the_tree_is_described_with_exact_counters(stub, admin):
    before = admin.DescribeTree(pb.DescribeTreeRequest())
    policy, head = types_pb2.CachePolicy(namespace="described"), words(70, seed=23)
    answer(stub, start([*head, 100, 101, 102], cache=policy))
    answer(stub, start([*head, 200, 201, 202], cache=policy))
    after = admin.DescribeTree(pb.DescribeTreeRequest())
    assert after.requests - before.requests == 2
    assert after.prompt_tokens - before.prompt_tokens == 146
    assert after.cached_tokens - before.cached_tokens == 70
    assert after.copied_tokens - before.copied_tokens == 6
    branches = admin.DescribeTree(pb.DescribeTreeRequest(namespace="described")).branches
    head_branch = next(branch for branch in branches if branch.start == 0)
    assert (head_branch.tokens, head_branch.children, head_branch.hits) == (64, 2, 1)
    assert {branch.parent_id for branch in branches if branch.start} == {head_branch.id}
    assert len(admin.DescribeTree(pb.DescribeTreeRequest(max_branches=1)).branches) == 1


def test_a_flush_empties_a_namespace_and_leaves_the_others(stub, admin):
    for namespace in ("flushed", "kept"):
        answer(stub, start(words(64, seed=24), cache=types_pb2.CachePolicy(namespace=namespace)))
    assert admin.FlushTree(pb.FlushTreeRequest(namespace="flushed")).freed_blocks > 0
    for namespace, cached in (("flushed", 0), ("kept", 63)):
        request = pb.MatchPrefixRequest(token_ids=words(64, seed=24), namespace=namespace)
        assert stub.MatchPrefix(request).cached_tokens == cached


def test_a_flush_while_an_answer_runs_lets_nothing_older_in(stub, admin):
    prompt, policy = words(64, seed=25), types_pb2.CachePolicy(namespace="busy")
    stopping = types_pb2.StopParams(max_tokens=40, ignore_eos=True)
    call = stub.Generate(iter([start(prompt, cache=policy, stopping=stopping)]), timeout=120)
    while not next(call).HasField("delta"):
        pass
    admin.FlushTree(pb.FlushTreeRequest())
    assert list(call)[-1].finished.usage.completion_tokens == 40
    request = pb.MatchPrefixRequest(token_ids=prompt, namespace="busy")
    assert stub.MatchPrefix(request).cached_tokens == 0


def test_bad_prefixes_and_pins_are_invalid_arguments(admin):
    no_time = pb.WarmPrefixRequest(token_ids=[100])
    no_time.pin.FromSeconds(0)
    for request, reason in (
        (pb.WarmPrefixRequest(), "PROMPT_EMPTY"),
        (pb.WarmPrefixRequest(token_ids=[10**6]), "TOKEN_OUT_OF_VOCABULARY"),
        (no_time, "BAD_PIN"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            admin.WarmPrefix(request)
        assert told(error.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    too_much = pb.WarmPrefixRequest(token_ids=words(7000, seed=26))
    too_much.pin.FromSeconds(60)
    held = admin.DescribeTree(pb.DescribeTreeRequest()).tokens
    with pytest.raises(grpc.RpcError) as error:
        admin.WarmPrefix(too_much)
    assert admin.DescribeTree(pb.DescribeTreeRequest()).tokens == held, "it was computed for nothing"
    assert told(error.value)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_LIMIT")


def test_health_is_told_under_the_services_name(executor):
    with executor.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "hermes.v1.Executor"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING


def test_a_terminated_executor_finishes_the_answer_that_runs(model_directory):
    process = ServiceProcess("executor", "--model", str(model_directory), "--kv-memory", "64MiB", *EXACT)
    with process.channel() as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)
        call = stub.Generate(iter([start([100, 200], stopping=types_pb2.StopParams(max_tokens=40, ignore_eos=True))]))
        assert next(call).WhichOneof("event") == "started"
        process.process.terminate()
        events = list(call)
    assert events[-1].finished.usage.completion_tokens == 40
    assert process.stop() == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--kv-memory", "100KiB"), "kv_memory"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--max-running", "64", "--max-batch-tokens", "32"), "max_running"),
        (("--device", "cuda"), "CUDA"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence_and_ends_with_2(model_directory, flags, sentence):
    if sentence == "CUDA" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    process = ServiceProcess("executor", "--model", str(model_directory), *flags, *EXACT)
    assert process.process.wait(60) == 2
    process.stop()
    said = [line for line in process.log if line.startswith("hermes-executor: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert "Traceback" not in "".join(process.log)
