"""Both services as processes, with the real model, asked as a backend would ask: by the client, and on the wire."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import ANY

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hermes.client import AsyncClient, Client
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, executor_pb2, executor_pb2_grpc, types_pb2
from shared.errors import HermesError
from tests.service.services import ServiceProcess, assembler_process, becomes_healthy, executor_process, told

SYSTEM = (
    "You are a helpful travel agent. " + "Answer briefly, kindly and truthfully, and say so when you do not know. " * 8
)
# The last token of an answer has no keys and values, and what fills less of a block than this is not copied.
MIN_COPY_TOKENS = 4
QUESTION = "What is the capital of France?"


@pytest.fixture
def client(assembler) -> Iterator[Client]:
    with Client(assembler.address) as client:
        yield client


@pytest.fixture(scope="module")
def stub(assembler) -> Iterator[assembler_pb2_grpc.AssemblerStub]:
    with assembler.channel() as channel:
        yield assembler_pb2_grpc.AssemblerStub(channel)


def hermes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hermes.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_question_gets_its_answer(client):
    answer = client.chat(QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_the_second_turn_of_a_chat_recomputes_its_own_tokens_alone(client):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is Lisbon?"}]
    first = client.chat(messages, temperature=0, max_tokens=60)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And Porto?"}]
    second = client.chat(messages, temperature=0, max_tokens=5)
    assert second.usage.cached_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens - second.usage.cached_tokens < 40


def test_the_tree_holds_an_answer_to_its_end_however_its_tokens_were_chosen(client):
    """At a temperature at which many answers, tokenized anew, would not have the ids that were generated."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Invent some names for a café."}]
    answer = client.chat(messages, temperature=1.3, top_k=0, top_p=1, max_tokens=30, n=8, seed=5)
    changed = 0
    for sample in answer.samples:
        ids = [*sample.token_ids[:-1]] if sample.finish_reason == "stop" else [*sample.token_ids]
        end = answer.usage.prompt_tokens + len(ids)
        turns = [*messages, {"role": "assistant", "content": sample.text}, {"role": "user", "content": "More."}]
        anew = client.assemble(turns, cache_read=False, cache_write=False)
        changed += list(anew.token_ids[answer.usage.prompt_tokens : end]) != ids
        if "\ufffd" in sample.text:  # half a character at its end
            continue
        assert client.chat(turns, max_tokens=1).usage.cached_tokens > end - 1 - MIN_COPY_TOKENS
    assert changed > 0


def test_a_look_at_a_prompt_tells_what_the_tree_has_of_it_and_changes_nothing(client, executor):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is Faro?"}]
    before = client.explain(messages, namespace="looked at")
    assert before.tree_cached_tokens == 0
    answer = client.chat(messages, namespace="looked at", temperature=0, max_tokens=20)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And Braga?"}]
    found = client.explain(messages, namespace="looked at")
    with executor.channel() as channel:
        request = executor_pb2.MatchPrefixRequest(token_ids=found.token_ids, namespace="looked at")
        matched = executor_pb2_grpc.ExecutorStub(channel).MatchPrefix(request).cached_tokens
    assert found.tree_cached_tokens == matched == sum(each.tree_cached_tokens for each in found.segments)
    assert 100 < matched < len(found.token_ids)
    texts = {each.message_index: each.text for each in found.segments if each.message_index is not None}
    assert texts == {index: message["content"] for index, message in enumerate(messages)}
    assert client.explain(messages, namespace="looked at") == replace(found, request_id=ANY, info=ANY)
    # An answer takes from both caches what was told.
    second = client.chat(messages, namespace="looked at", temperature=0, max_tokens=5)
    assert second.usage.cached_tokens == matched
    assert second.info.cached_tokens == found.info.cached_tokens > 0


def test_the_command_line_shows_a_prompt_in_pieces(assembler):
    shown = hermes("explain", "What is the capital of France?", "--address", assembler.address)
    assert shown.returncode == 0
    assert "0 user        What is the capital of France?\n" in shown.stdout
    assert "assembly cache  " in shown.stdout


def test_what_streams_is_what_is_answered_whole(client):
    with client.stream(QUESTION, temperature=0, max_tokens=40) as stream:
        pieces = list(stream)
        answer = stream.answer
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == client.chat(QUESTION, temperature=0, max_tokens=40).text


def test_text_never_splits_a_character(client):
    with client.stream(
        "Write ten different emoji and a line of Chinese.", temperature=1, seed=3, max_tokens=120
    ) as stream:
        pieces = list(stream)
    assert not any("�" in piece for piece in pieces[:-1])


def test_assembled_ids_can_be_generated_from(client):
    assembled = client.assemble(QUESTION, return_text=True)
    assert assembled.text.endswith("<|im_start|>assistant\n")
    answer = client.chat(token_ids=assembled.token_ids, temperature=0, max_tokens=40)
    assert answer.text == client.chat(QUESTION, temperature=0, max_tokens=40).text


async def test_many_callers_at_once_get_what_each_would_get_alone(assembler):
    questions = [f"What is the capital of {country}?" for country in ("France", "Italy", "Germany", "Spain", "Peru")]
    greedy = {"temperature": 0, "max_tokens": 30}
    async with AsyncClient(assembler.address) as client:
        together = await asyncio.gather(*(client.chat(question, **greedy) for question in questions))
        alone = [await client.chat(question, **greedy, cache_read=False) for question in questions]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


def chat(*turns: tuple[str, str], **fields) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role=role, content=content) for role, content in turns]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages, **fields))


HI = chat(("user", "hi"))
BAD_REQUESTS = {
    "no messages": ({"prompt": chat()}, "NO_MESSAGES"),
    "no prompt": ({}, "PROMPT_MISSING"),
    "unknown role": ({"prompt": chat(("wizard", "hi"))}, "UNKNOWN_ROLE"),
    "generation prompt and continue": (
        {"prompt": chat(("assistant", "hi"), add_generation_prompt=True, continue_final_message=True)},
        "GENERATION_PROMPT_CONFLICT",
    ),
    "temperature": ({"prompt": HI, "sampling": types_pb2.SamplingParams(temperature=-1)}, "BAD_SAMPLING"),
    "top_p 0": ({"prompt": HI, "sampling": types_pb2.SamplingParams(top_p=0)}, "BAD_SAMPLING"),
    "top_p 2": ({"prompt": HI, "sampling": types_pb2.SamplingParams(top_p=2)}, "BAD_SAMPLING"),
    "max_tokens 0": ({"prompt": HI, "stopping": types_pb2.StopParams(max_tokens=0)}, "BAD_STOPPING"),
    "too long": ({"prompt": chat(("user", "word " * 9000))}, "PROMPT_TOO_LONG"),
    "wrong model": ({"prompt": HI, "model": "gpt-17"}, "MODEL_NOT_SERVED"),
    "token id": (
        {"prompt": assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=[1, 49152]))},
        "TOKEN_OUT_OF_VOCABULARY",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_input_is_an_invalid_argument_with_a_sentence(stub, fields, reason):
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(assembler_pb2.AssemblerGenerateRequest(**fields), timeout=60))
    said = told(error.value)
    assert (said.code, said.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert said.message.strip().endswith(".")


def _runs(executor: ServiceProcess) -> int:
    with executor.channel() as channel:
        return executor_pb2_grpc.ExecutorStub(channel).GetLoad(executor_pb2.GetLoadRequest()).running_requests


def _until(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def test_a_caller_who_goes_away_stops_the_executor(executor, client):
    with client.stream("Tell me a long story.", ignore_eos=True, max_tokens=4000, temperature=0) as stream:
        next(stream)
        assert _runs(executor) == 1
    _until(lambda: _runs(executor) == 0)


def test_a_deadline_passes_through_both_hops(executor, client):
    with pytest.raises(HermesError) as error:
        client.chat("Tell me a long story.", ignore_eos=True, max_tokens=4000, timeout=1.5)
    assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    _until(lambda: _runs(executor) == 0)


def test_samples_of_one_prompt_end_one_by_one_by_their_own_stop_strings(client):
    samples = client.chat("Name a colour.", n=3, temperature=1, seed=8, max_tokens=40, stop="e", logprobs=0).samples
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert not any("e" in sample.text for sample in samples)
    assert all(len(sample.logprobs) == len(sample.token_ids) for sample in samples)


def test_the_tree_is_warmed_shown_and_flushed_from_the_command_line(assembler, executor):
    both = ("--address", assembler.address, "--executor", executor.address)
    assert "were computed" in hermes("cache", "warm", "--system", SYSTEM, "--namespace", "cli", *both).stderr
    pinned = hermes("cache", "pin", "--system", SYSTEM, "--namespace", "cli", "--for", "60", *both)
    assert pinned.returncode == 0, pinned.stderr
    shown = hermes("cache", "tree", "--namespace", "cli", "--executor", executor.address).stdout
    assert "pinned" in shown
    assert hermes("cache", "unpin", pinned.stdout.strip(), "--executor", executor.address).returncode == 0
    counted = hermes("cache", "stats", *both).stdout
    assert "prompts:" in counted
    assert "tree:" in counted
    flushed = hermes("cache", "flush", "--namespace", "cli", *both)
    assert "blocks were freed" in flushed.stderr
    assert "are forgotten" in flushed.stderr


@pytest.mark.parametrize("place", [0, 4, 8])
def test_the_cost_of_a_changing_beginning_is_what_its_remedy_brings(client, place):
    """The tokens told are those that the tree has more of, once the date stands in the last user message."""

    def cached(namespace: str, system: str, question: str):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = client.chat(messages, temperature=0, max_tokens=1, namespace=namespace)
        return answer.usage.cached_tokens, answer.info.warnings

    sentences = SYSTEM.strip().split(". ")
    head, tail = ". ".join(sentences[:place]), ". ".join(sentences[place:])
    for date, question in (("2026-11-30", "Where is Lisbon?"), ("2027-01-04", "Is Porto nice?")):
        before, warnings = cached(f"dated {place}", f"{head} It is {date}. {tail}", question)
    for date, question in (("2026-11-30", "Where is Lisbon?"), ("2027-01-04", "Is Porto nice?")):
        after, silence = cached(f"mended {place}", f"{head} {tail}", f"{question} It is {date}.")
    (warning,) = warnings
    assert (warning.code, silence) == ("DYNAMIC_PREFIX", ())
    # The tree copies what is left of a block from four tokens on, and the sentence around the date moves with it.
    assert abs(after - before - warning.tokens) <= 10
    assert warning.tokens > 10


def test_the_cost_of_a_time_is_that_of_the_turns_before_also_where_conversations_take_turns(client):
    """The tokens told at each turn are those that the tree has more of without the time."""
    talks = [[{"role": "user", "content": f"Question {talk}: " + "tell me of a river. " * 6}] for talk in range(2)]
    for turn in range(3):
        for talk, messages in enumerate(talks):
            system = f"It is 10:{turn:02}:{talk:02}. {SYSTEM}"
            cached = []
            for content in (system, SYSTEM):
                turns = [{"role": "system", "content": content}, *messages]
                namespace = "timed" if content is system else "untimed"
                answer = client.chat(turns, temperature=0, max_tokens=1, namespace=namespace)
                cached.append(answer.usage.cached_tokens)
                if content is system:
                    warnings = answer.info.warnings
            if turn:
                (warning,) = warnings
                assert abs(cached[1] - cached[0] - warning.tokens) <= 15, (turn, talk)
                assert warning.tokens > 100
            messages += [
                {"role": "assistant", "content": "It is a fine river. " * 15},
                {"role": "user", "content": f"And what of {turn}?"},
            ]


def test_a_stop_string_ends_the_answer_before_it(client):
    answer = client.chat(QUESTION, temperature=0, max_tokens=40, stop="Paris")
    assert answer.finish_reason == "stop"
    assert "Paris" not in answer.text
    assert answer.text


def test_a_conversation_beyond_its_window_keeps_its_hits_between_cuts(client):
    """After a cut only the system part is known to the tree; the turn after it is as cheap as ever."""
    messages, dropped, computed = [{"role": "system", "content": SYSTEM}], [], []
    for turn in range(16):
        messages.append({"role": "user", "content": f"Question {turn}: " + "tell me of a river and a town by it. " * 5})
        answer = client.chat(messages, temperature=0, max_tokens=4, namespace="rounds", max_prompt_tokens=900)
        messages.append({"role": "assistant", "content": answer.text + " It is a fine river." * 5})
        dropped.append(answer.info.dropped_rounds)
        computed.append(answer.usage.prompt_tokens - answer.usage.cached_tokens)
        assert answer.usage.prompt_tokens <= 900
    cuts = [turn for turn in range(1, len(dropped)) if dropped[turn] != dropped[turn - 1]]
    assert len(cuts) >= 2
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(cuts))
    usual = 1.2 * max(computed[turn] for turn in range(1, cuts[0]))  # of one turn; answers differ a little
    assert all(computed[turn + 1] < usual < computed[turn] for turn in cuts if turn + 1 < len(computed)), computed


def test_the_executors_metrics_count_what_was_cached(executor, assembler, client):
    def total(name: str) -> float:
        port = next(line.rpartition(":")[2].split("/")[0] for line in executor.log if "metrics on" in line)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert all(sample.labels["model_name"] == "SmolLM2-135M-Instruct" for sample in samples)
        return sum(sample.value for sample in samples)

    names = [
        "hermes_prefix_cache_prompt_tokens_total",
        "hermes_prefix_cache_hit_tokens_total",
        "hermes_prefix_cache_hit_length_tokens_count",
        "hermes_prefix_cache_hit_length_tokens_sum",
        "hermes_time_to_first_token_seconds_count",
        "hermes_inter_token_latency_seconds_count",
        "hermes_request_success_total",
    ]
    before = [total(name) for name in names]
    asked = {"temperature": 0, "max_tokens": 7, "ignore_eos": True, "namespace": "metrics"}
    usages = [client.chat(SYSTEM, **asked).usage for _ in range(2)]
    prompt, cached = usages[1].prompt_tokens, usages[1].cached_tokens
    assert cached == prompt - 1
    assert [total(name) - count for name, count in zip(names, before, strict=True)] == [
        2 * prompt, cached, 1, cached, 2, 12, 2,
    ]  # fmt: skip
    assert total("hermes_requests_running") == 0
    assert total("hermes_kv_blocks") > 0


def test_the_command_line_answers_assembles_and_reports(assembler, executor):
    address = ("--address", assembler.address)
    said = hermes("chat", QUESTION, "--temperature", "0", *address)
    assert "Paris" in said.stdout
    assert '"finish_reason"' in hermes("chat", QUESTION, "--temperature", "0", "--json", *address).stdout
    assert "<|im_start|>" in hermes("assemble", QUESTION, *address).stdout
    healthy = hermes("health", *address, "--executor", executor.address)
    assert healthy.returncode == 0, healthy
    wrong = hermes("chat", QUESTION, "--temperature", "-1", *address)
    assert wrong.returncode == 1
    assert "temperature" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_killed_executor_is_told_at_once_and_found_again_when_it_is_back(model_directory):
    with contextlib.ExitStack() as processes:
        executor = executor_process(model_directory)
        processes.callback(executor.kill)
        port = executor.port
        assembler = assembler_process(model_directory, executor)
        processes.callback(assembler.kill)
        client = processes.enter_context(Client(assembler.address))
        stream = client.stream("Tell me a long story.", ignore_eos=True, max_tokens=4000)
        next(stream)
        executor.kill()
        with pytest.raises(HermesError) as error:
            list(stream)
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        with pytest.raises(HermesError) as error:
            client.chat(QUESTION)
        assert error.value.reason == "EXECUTOR_UNAVAILABLE"
        assert client.assemble(QUESTION).token_ids, "prompts can be assembled all the same"

        back = executor_process(model_directory, port)
        processes.callback(back.kill)
        assert back.address
        becomes_healthy(assembler)
        assert "Paris" in client.chat(QUESTION, temperature=0, max_tokens=40).text
