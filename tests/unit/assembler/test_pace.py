"""What takes a template long is learned, and done beside the event loop."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from assembler import model_files
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.order import OrderPolicy
from assembler.orders import Order
from assembler.pace import Pace
from assembler.pipeline import Assembler
from assembler.rendering import Renderer
from assembler.templates import RenderOptions
from assembler.turns import Page, Scope
from hermes.v1 import assembler_pb2

QUICK = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
SLOW = "{% for m in messages %}{% for _ in range(2000) %}{% set x = m.content ~ 'a' %}{% endfor %}{{ m.content }}{% endfor %}"


def chat(messages: int) -> assembler_pb2.Prompt:
    prompt = assembler_pb2.Prompt()
    for number in range(messages):
        prompt.chat.messages.add(role="assistant" if number % 2 else "user", content="Hello")
    return prompt


@pytest.mark.parametrize(("source", "is_beside"), [(QUICK, False), (SLOW, True)])
async def test_a_slow_template_renders_beside_the_event_loop_from_the_first_request_on(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, source: str, is_beside: bool
) -> None:
    template = JinjaTemplate(source, {})
    files = replace(model_files.load(model_directory), template=template)
    assembler = Assembler(files)
    threads, write = [], JinjaTemplate.write

    def seen(*arguments: object, **named: object) -> Page:
        threads.append(threading.current_thread())
        return write(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(JinjaTemplate, "write", seen)
    await assembler.assemble(Order(chat(40), None))
    assembler.close()
    assert [thread is not threading.main_thread() for thread in threads] == [is_beside] * len(threads)


def test_short_renders_tell_nothing_of_long_ones_and_one_slow_one_is_soon_forgotten() -> None:
    pace = Pace()
    usual = pace.seconds(40_000, 0)
    for _ in range(50):
        pace.timed(10, 1, lambda: sum(range(1000)))
    assert pace.seconds(40_000, 0) == usual
    pace.timed(10, 1, lambda: sum(range(3_000_000)))
    assert pace.seconds(40_000, 0) > 10 * usual
    for _ in range(100):
        pace.timed(10, 1, lambda: None)
    assert pace.seconds(40_000, 0) < 2 * usual


def test_a_render_that_fails_is_learned_from_too() -> None:
    pace = Pace()

    def fail() -> None:
        sum(range(3_000_000))
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        pace.timed(10, 1, fail)
    assert pace.seconds(10, 1) > 0.001


async def test_what_a_short_end_takes_tells_nothing_of_a_whole_conversation(model_directory: Path) -> None:
    files = model_files.load(model_directory)
    renderer = Renderer(JinjaTemplate(SLOW, {}), files.tokenizer, OrderPolicy(), "encode")
    before = renderer.pace.seconds(100_000, 100)
    told = Conversation(tuple(Message(Role.USER, "Hello" * 20) for _ in range(12)))
    for length in range(4, 12):
        renderer.render(replace(told, messages=told.messages[:length]), RenderOptions(), Scope("n", b""))
    assert renderer.pace.seconds(100_000, 100) > before / 4
