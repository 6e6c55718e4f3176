import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from assembler.model_files import ModelFiles
from assembler.orders import Assembled, Order, Policies
from assembler.pipeline import Assembler
from assembler.tokenizer import Tokenizer
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError

CODE = 'def f(x):\n\treturn {"a": [x, None]}  # ünï\n\n\n```python\nprint("hi")\n```\n'
LONG = "All work and no play makes Jack a dull boy. " * 200
SYSTEM = ("system", "You are a pirate.")

CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "What is the capital of France?")],
    [SYSTEM, ("user", "What is the capital of France?")],
    [("system", ""), ("user", "hi")],
    [("user", "")],
    [("user", ""), ("assistant", ""), ("user", "")],
    [("user", " ")],
    [("user", "  padded  ")],
    [("user", "\n\nlines\n\n"), ("assistant", "\tanswer \n"), ("user", " next")],
    [("user", "你好，请用中文回答。"), ("assistant", "好的！"), ("user", "谢谢")],
    [("system", "用中文回答"), ("user", "今天天气怎么样")],
    [("user", "日本語とEnglishのmix、カタカナ。한국어도")],
    [("user", "😀👩‍👩‍👧‍👦🇩🇪✈️👍🏽")],
    [("user", "emoji 🎉 in text"), ("assistant", "🎊"), ("user", "more 🥳")],
    [("user", "नमस्ते مرحبا שלום สวัสดี Ελλάδα Привет")],
    [("user", "e\u0301 vs é, ﬁ vs fi, \u200bzero\u200dwidth")],
    [("user", CODE)],
    [SYSTEM, ("user", CODE), ("assistant", CODE), ("user", "shorter")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    [SYSTEM, *[(role, f"turn {turn}") for turn in range(20) for role in ("user", "assistant")], ("user", "end")],
    [("user", "first"), ("user", "second")],
    [("user", "q"), ("assistant", "a")],
    [("assistant", "I begin."), ("user", "fine")],
    [("system", "one"), ("system", "two"), ("user", "q")],
    [("user", "q"), ("system", "late"), ("user", "r")],
    [("user", "call it"), ("tool", '{"temperature": 21}'), ("user", "and?")],
    [("user", LONG)],
    [SYSTEM, ("user", LONG), ("assistant", LONG), ("user", "sum up")],
    [("user", "x" * 5000)],
    [("user", "0123456789 " * 50 + "3.14159e-10 0xFF 1,000,000")],
    [("user", "{{ messages }} {% raise %} {# no #}")],
    [("user", "'quotes' \"double\" `back` \\n \\ / <b>&amp;</b>")],
    [("user", "\x00\x01\x07\x1b[0m\x7f")],
    [("user", "http://example.com/?q=a&b=%20#frag"), ("assistant", "ok"), ("user", "mail@example.com")],
    [("user", "MiXeD CaSe don't I'LL")],
]


@pytest.fixture
def assembler(files: ModelFiles) -> Iterator[Assembler]:
    made = Assembler(files)
    yield made
    made.close()


def chat(turns: list[tuple[str, str]], **fields: Any) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role=role, content=content) for role, content in turns]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages, **fields))


def ids(*token_ids: int) -> assembler_pb2.Prompt:
    return assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=token_ids))


async def refused(assembler: Assembler, prompt: assembler_pb2.Prompt, max_tokens: int | None = 8192) -> HermesError:
    with pytest.raises(HermesError) as caught:
        await assembler.assemble(Order(prompt, max_tokens))
    return caught.value


@pytest.mark.parametrize("place", range(len(CONVERSATIONS)))
async def test_ids_are_those_of_transformers(assembler: Assembler, reference: Any, place: int) -> None:
    turns = CONVERSATIONS[place]
    messages = [{"role": role, "content": content} for role, content in turns]
    assembled = await assembler.assemble(Order(chat(turns), None, return_text=True))
    assert list(assembled.ids) == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert assembled.text == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


async def test_options_of_a_chat_are_those_of_transformers(assembler: Assembler, reference: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Paris is "}]
    turns = [("human", "q"), ("bot", "Paris is ")]
    closed = await assembler.assemble(Order(chat(turns, add_generation_prompt=False), None))
    opened = await assembler.assemble(Order(chat(turns, continue_final_message=True), None, return_text=True))
    assert list(closed.ids) == reference.apply_chat_template(messages)["input_ids"]
    assert list(opened.ids) == reference.apply_chat_template(messages, continue_final_message=True)["input_ids"]
    assert opened.text is not None
    assert opened.text.endswith("Paris is ")


async def test_ready_ids_come_back_as_they_are_with_their_text(assembler: Assembler) -> None:
    first = await assembler.assemble(Order(chat([("user", "hi")]), None, return_text=True))
    again = await assembler.assemble(Order(ids(*first.ids), None, return_text=True))
    assert (again.ids, again.text, again.template_version) == (first.ids, first.text, "")
    assert first.template_version


async def test_text_prompts_need_no_template_but_chats_do(files: ModelFiles) -> None:
    bare = Assembler(replace(files, template=None))
    assembled = await bare.assemble(Order(assembler_pb2.Prompt(text="Once upon"), None, return_text=True))
    assert (list(assembled.ids), assembled.text) == (list(files.tokenizer.encode_raw("Once upon")), "Once upon")
    error = await refused(bare, chat([("user", "q")]))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")
    bare.close()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (assembler_pb2.Prompt(), "PROMPT_MISSING"),
        (assembler_pb2.Prompt(text=""), "PROMPT_EMPTY"),
        (ids(), "PROMPT_EMPTY"),
        (ids(1, 49_152), "TOKEN_OUT_OF_VOCABULARY"),
        (ids(2**32 - 1), "TOKEN_OUT_OF_VOCABULARY"),
        (chat([]), "NO_MESSAGES"),
        (chat([("wizard", "q")]), "UNKNOWN_ROLE"),
        (chat([("user", "q")], template_kwargs_json='{"never_read": 1}'), "BAD_TEMPLATE_KWARGS"),
        (chat([("user", "q")], template_kwargs_json="[]"), "BAD_TEMPLATE_KWARGS"),
        (
            chat([("user", "q"), ("assistant", "a")], add_generation_prompt=True, continue_final_message=True),
            "GENERATION_PROMPT_CONFLICT",
        ),
        (assembler_pb2.Prompt(text="word " * 9000), "PROMPT_TOO_LONG"),
        (chat([("user", "word " * 9000)]), "PROMPT_TOO_LONG"),
        (ids(*[1] * 8193), "PROMPT_TOO_LONG"),
    ],
)
async def test_a_bad_prompt_is_the_callers_fault(
    assembler: Assembler, prompt: assembler_pb2.Prompt, reason: str
) -> None:
    error = await refused(assembler, prompt)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert error.message.endswith(".")


async def test_a_prompt_that_just_fits_is_taken(assembler: Assembler) -> None:
    assembled: Assembled = await assembler.assemble(Order(ids(*[1] * 8192), 8192))
    assert len(assembled.ids) == 8192


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(
    assembler: Assembler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: object, text: str) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr("assembler.tokenizer.Tokenizer.encode_raw", never)
    error = await refused(assembler, assembler_pb2.Prompt(text="a" * 5_000_000))
    assert error.reason == "PROMPT_TOO_LONG"
    assert "at least" in error.message


async def test_a_long_text_is_worked_on_beside_the_event_loop(assembler: Assembler, reference: Any) -> None:
    text = "The quick brown fox. 😀 " * 4000
    task = asyncio.create_task(assembler.assemble(Order(assembler_pb2.Prompt(text=text), None)))
    await asyncio.sleep(0)
    assert not task.done()
    assert list((await task).ids) == reference(text)["input_ids"]


@pytest.mark.parametrize("return_text", [True, False], ids=["returned", "logged"])
async def test_long_ids_are_decoded_beside_the_event_loop(
    files: ModelFiles, return_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, decode = set(), Tokenizer.decode

    def noting(own: Tokenizer, ids: Sequence[int]) -> str:
        threads.add(threading.current_thread())
        return decode(own, ids)

    text = "The quick brown fox. 😀 " * 2000
    assembler = Assembler(files, Policies(log_head_tail=not return_text))
    monkeypatch.setattr(Tokenizer, "decode", noting)
    assembled = await assembler.assemble(Order(ids(*files.tokenizer.encode(text)), None, return_text=return_text))
    assembler.close()
    assert assembled.text == (text if return_text else None)
    assert threads
    assert threading.main_thread() not in threads


async def test_long_ids_are_read_beside_the_event_loop_and_refused_where_the_model_lacks_one(
    assembler: Assembler,
) -> None:
    many = [place % 49_000 for place in range(40_000)]
    task = asyncio.create_task(assembler.assemble(Order(ids(*many), None)))
    await asyncio.sleep(0)
    assert not task.done()
    assert list((await task).ids) == many
    with pytest.raises(HermesError) as caught:
        await assembler.assemble(Order(ids(*many, 49_152), None))
    assert (caught.value.reason, caught.value.metadata["position"]) == ("TOKEN_OUT_OF_VOCABULARY", "40000")


async def test_control_text_is_encoded_beside_the_event_loop_also_in_shorter_prompts(assembler: Assembler) -> None:
    prompt = chat([("user", "Is <|im_end|> a token? " * 500)])
    task = asyncio.create_task(assembler.assemble(Order(prompt, None)))
    await asyncio.sleep(0)
    assert not task.done()
    assert list((await task).ids).count(2) == 2  # the template's own, of the system's turn and of this one


@pytest.mark.parametrize(
    "prompt",
    [
        assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=[2**32 - 1] * 101)),
        assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=[types_pb2.Message(role="nobody")] * 101)),
    ],
    ids=["ids", "messages"],
)
async def test_more_ids_or_messages_than_tokens_fit_are_refused_before_they_are_looked_at(assembler, prompt):
    with pytest.raises(HermesError) as refusal:
        await assembler.assemble(Order(prompt, max_tokens=100))
    assert refusal.value.reason == "PROMPT_TOO_LONG"
    assert "101" in refusal.value.message
