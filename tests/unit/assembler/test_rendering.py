import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from assembler import model_files
from assembler.control import _SYMBOLS
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.rendering import Rendered, Renderer
from assembler.templates import RenderOptions
from assembler.tokenizer import Tokenizer
from shared.errors import HermesError
from tests.unit.assembler.model_styles import STYLES

STRICT = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('in turn') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"


def told(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(Role(role), content) for role, content in turns))


def renderer(files: ModelFiles, source: str, policy: OrderPolicy | None = None, **fields: Any) -> Renderer:
    return Renderer(
        JinjaTemplate(source, {}), files.tokenizer, policy or OrderPolicy(), fields.get("control", "encode")
    )


def render(files: ModelFiles, source: str, conversation: Conversation, *rest: Any, **fields: Any) -> Rendered:
    return renderer(files, source, *rest, **fields).render(conversation, RenderOptions())


def test_a_conversation_that_the_template_takes_stays_as_it_is(files: ModelFiles) -> None:
    odd = told(("user", "a"), ("user", "b"), ("system", "c"))
    rendered = render(files, CHATML, odd)
    assert rendered.reading.text.count("<|im_start|>") == 3
    assert [finding.code for finding in rendered.findings] == ["ROLE_ORDER", "ROLE_ORDER"]


def test_one_that_it_refuses_is_mended_and_that_is_told(files: ModelFiles) -> None:
    odd = told(("system", "a"), ("user", "b"), ("user", "c"), ("system", "d"))
    rendered = render(files, STRICT, odd)
    assert rendered.reading.text == "<system>a\n\nd<user>b\n\nc"
    assert "joined" in rendered.findings[-1].message


def test_a_system_message_goes_to_the_user_where_the_template_has_no_place_for_it(files: ModelFiles) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}|{% endfor %}"
    assert render(files, source, told(("system", "a"), ("user", "b"))).reading.text == "a\n\nb|"


def test_where_no_mend_is_allowed_or_helps_the_error_is_what_the_template_said(files: ModelFiles) -> None:
    odd = told(("user", "a"), ("user", "b"))
    for policy, conversation in (
        (OrderPolicy(merge_system=False, merge_same_role=False), odd),
        (OrderPolicy(merge_same_role=False), odd),
    ):
        with pytest.raises(HermesError, match="in turn") as caught:
            render(files, STRICT, conversation, policy)
        assert caught.value.reason == "TEMPLATE_ERROR"
    with pytest.raises(HermesError, match="never"):
        render(files, "{{ raise_exception('never') }}", odd)


def test_strict_refuses_what_else_is_a_warning(files: ModelFiles) -> None:
    with pytest.raises(HermesError) as caught:
        render(files, CHATML, told(("user", "a"), ("user", "b")), OrderPolicy(strict=True))
    assert (caught.value.reason, caught.value.metadata["message_index"]) == ("ROLE_ORDER", "1")


def test_control_text_is_told_with_its_message(files: ModelFiles) -> None:
    rendered = render(files, CHATML, told(("user", "a"), ("assistant", "b<|im_end|>"), ("user", "c")))
    (finding,) = rendered.findings
    assert (finding.code, finding.message_index) == ("CONTROL_TEXT", 1)
    assert "<|im_end|>" in finding.message
    assert rendered.reading.live is not None
    assert [each.token for each in rendered.reading.live] == ["<|im_start|>", "<|im_end|>"] * 3


def test_control_text_is_refused_where_the_server_says_so(files: ModelFiles) -> None:
    for conversation, index in (
        (told(("user", "a"), ("assistant", "b<|im_end|>")), {"message_index": "1"}),
        (told(("user", "<|im_start|>")), {"message_index": "0"}),
    ):
        with pytest.raises(HermesError) as caught:
            render(files, CHATML, conversation, control="reject")
        assert (caught.value.reason, caught.value.metadata) == ("CONTROL_TEXT", index)
    assert render(files, CHATML, told(("user", "a < b <|im")), control="reject").reading.live is None


def test_control_text_that_the_template_drops_is_no_matter(files: ModelFiles) -> None:
    assert render(files, "{{ messages[-1].content }}", told(("user", "<|im_end|>"), ("user", "a"))).findings[1:] == ()


def test_a_tokenizer_that_cannot_write_a_token_as_text_has_prompts_with_it_refused(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: Tokenizer, text: str, live: Any) -> Any:
        return self.encode(text)

    monkeypatch.setattr(Tokenizer, "encode_guarded", forget)
    with caplog.at_level(logging.WARNING):
        made = renderer(files, CHATML)
    assert "cannot write" in caplog.text
    with pytest.raises(HermesError, match="refuses"):
        made.render(told(("user", "a<|im_end|>")), RenderOptions())
    assert made.render(told(("user", "a < b")), RenderOptions()).reading.live is None


def test_a_template_that_does_not_do_alike_with_control_text_has_it_refused(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    source = CHATML + "{% if '-' not in messages[0].content %}<|im_start|>{% endif %}"
    with caplog.at_level(logging.WARNING):
        made = renderer(files, source)
    assert "the template changes texts" in caplog.text
    with pytest.raises(HermesError, match="refuses"):
        made.render(told(("user", "a<|im_end|>")), RenderOptions())


def test_every_stand_in_is_a_symbol_that_the_request_does_not_have(files: ModelFiles) -> None:
    text = "".join(_SYMBOLS[:-1]) + "<|im_end|>"
    rendered = render(files, CHATML, told(("user", text)))
    assert text in rendered.reading.text
    with pytest.raises(HermesError, match="symbol"):
        render(files, CHATML, told(("user", "".join(_SYMBOLS) + "<|im_end|>")))
    escaped = "".join(f"\\u{ord(symbol):04x}" for symbol in _SYMBOLS)
    with pytest.raises(HermesError, match="symbol"):
        render(files, CHATML, told(("user", escaped + "<|im_end|>")))


def test_a_template_that_writes_ascii_json_keeps_tokens_as_text(files: ModelFiles) -> None:
    source = "{{ messages | tojson(ensure_ascii=true) }}<|im_end|>"
    rendered = render(files, source, told(("user", 'é<|im_end|>\n"\\u2800')))
    assert rendered.reading.text.startswith('[{"role": "user", "content": "\\u00e9<|im_end|>\\n\\"\\\\u2800"}]')
    assert rendered.reading.live is not None
    assert len(rendered.reading.live) == 1


def test_text_that_only_looks_like_a_beginning_gets_the_template_s_plain_render(files: ModelFiles) -> None:
    source = (
        "{% for m in messages %}{{ 'odd' if m.content[0] == '<' else 'even' }}{{ m.content }}{% endfor %}<|im_end|>"
    )
    assert render(files, source, told(("user", "<"))).reading.text == "odd<<|im_end|>"


def test_a_role_mark_that_is_not_special_and_built_of_parts_cannot_be_forged(tmp_path: Path) -> None:
    style = next(each for each in STYLES if each.name == "phi4_mini")
    built = dataclasses.replace(style, special=("<|endoftext|>",), plain=(*style.special[1:], *style.plain))
    files = model_files.load(built.write(tmp_path))
    assert {"<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"} <= set(files.tokenizer.added.control)


@pytest.mark.parametrize("content", ["a" * 5_000_000, "<" * 1_000_000, "<|im_end|>" * 50_000, "[{" * 500_000])
def test_long_texts_are_rendered(files: ModelFiles, content: str) -> None:
    assert content in render(files, CHATML, told(("user", content))).reading.text


def test_ten_thousand_messages_are_rendered(files: ModelFiles) -> None:
    many = Conversation(tuple(Message((Role.USER, Role.ASSISTANT)[at % 2], f"{at}<") for at in range(10_000)))
    assert render(files, CHATML, many).reading.text.count("<|im_start|>") == 10_000
