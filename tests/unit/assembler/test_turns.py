"""Going on with a conversation comes out as rendering all of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assembler import model_files
from assembler.drafts import Asked
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.rendering import Renderer
from assembler.templates import RenderOptions
from assembler.tools import Tool, ToolCall
from assembler.traced import own_of
from assembler.turns import Page, Scope, Told, Turns
from shared.errors import HermesError
from tests.unit.assembler.model_styles import STYLES

OPTIONS = RenderOptions()
SCOPE = Scope("tag", b"digest")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}<S>{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT = (
    "{% for message in messages %}[{{ loop.index }}{{ messages[loop.index0 - 1].role if loop.index0 }} {{ message.content }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %} waits{% endif %}]{% endfor %}"
)
ENDS = (
    "{% for message in messages %}{% if message.content == 'end' %}{% break %}{% endif %}"
    "{{ message.content }};{% endfor %}"
)
FROM_END = "{% for message in messages %}{{ messages[loop.index0 - 2].content }}:{{ message.content }};{% endfor %}"
PLACES = (
    "{% for message in messages %}{{ loop.index }},{{ loop.index0 }},{{ loop.first }},{{ loop.last }},"
    "{{ loop.previtem.content if not loop.first }},{{ loop.nextitem.content if not loop.last }};{% endfor %}"
)

TEXTS = st.sampled_from(["", "a", " padded \n", "<|im_end|>", "end", "{{ x }}", "<think>r</think>s", "é\U0001f389"])
CALLS = st.lists(st.integers(0, 9), max_size=2).map(
    lambda values: tuple(ToolCall("f", f'{{"x": {value}}}', {"x": value}, f"call0000{value}") for value in values)
)
ANSWERS = st.tuples(TEXTS, st.none() | TEXTS, CALLS)
MESSAGES = st.one_of(
    st.tuples(st.sampled_from([Role.USER, Role.SYSTEM]), TEXTS).map(lambda said: Message(*said)),
    ANSWERS.map(lambda said: Message(Role.ASSISTANT, said[0], reasoning=said[1], tool_calls=said[2])),
    TEXTS.map(lambda text: Message(Role.TOOL, text, "f", "call00001")),
)
TOOLS = st.sampled_from([(), (Tool({"name": "f", "parameters": {"type": "object", "properties": {}}}, 60),)])


def talk(*contents: str) -> Conversation:
    roles = (Role.USER, Role.ASSISTANT)
    return Conversation(tuple(Message(roles[at % 2], content) for at, content in enumerate(contents)))


def written(template: JinjaTemplate, conversation: Conversation, told: Told | None = None) -> Page | str:
    try:
        return template.write(conversation, OPTIONS, told)
    except HermesError as error:
        return error.message


def assert_same(page: Page | str, whole: Page | str) -> None:
    if isinstance(page, str) or isinstance(whole, str):
        assert page == whole
    else:
        assert page.text == whole.text
        assert own_of(page.text) == own_of(whole.text)


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": JinjaTemplate(CHATML, {}),
    "next": JinjaTemplate(NEXT, {}),
    "ends": JinjaTemplate(ENDS, {}),
    "from the end": JinjaTemplate(FROM_END, {}),
    "places": JinjaTemplate(PLACES, {}),
    **{style.name: JinjaTemplate(style.source, NAMED) for style in STYLES},
}
# Templates of which one at least is known to write each message by itself, or these tests show nothing.
GOING_ON = ("chatml", "next", "places", "smollm2", "zephyr", "hermes", "phi3")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=12), tools=TOOLS, data=st.data())
def test_a_conversation_that_goes_on_comes_out_as_when_it_is_rendered_whole(
    name: str, messages: list[Message], tools: tuple[Tool, ...], data: st.DataObject
) -> None:
    template, turns = TEMPLATES[name], Turns()
    for end in sorted(data.draw(st.sets(st.integers(1, len(messages)), min_size=1, max_size=5))):
        conversation = Conversation(tuple(messages[:end]), tools)
        told = turns.find(SCOPE, conversation.messages)
        page = written(template, conversation, told)
        assert_same(page, written(template, conversation))
        if isinstance(page, Page) and page.told is not None:
            turns.keep(SCOPE, page.told, told)


@pytest.mark.parametrize("name", GOING_ON)
def test_of_a_conversation_that_has_grown_only_the_end_is_rendered(name: str) -> None:
    contents = [f"text {place}" for place in range(9)]
    first = TEMPLATES[name].write(talk(*contents[:7]), OPTIONS)
    assert first.told is not None
    second = TEMPLATES[name].write(talk(*contents), OPTIONS, first.told)
    again = second.text[second.again]
    assert again == "".join(first.told.pieces)
    assert "text 4" in again
    assert again in first.text


def test_where_a_template_counts_from_the_end_nothing_is_gone_on_from() -> None:
    assert TEMPLATES["from the end"].write(talk("a", "b", "c", "d"), OPTIONS).told is None


def test_where_a_template_stops_early_nothing_is_gone_on_from() -> None:
    assert TEMPLATES["ends"].write(talk("a", "b", "end", "d"), OPTIONS).told is None
    assert TEMPLATES["ends"].write(talk("a", "b", "c", "d"), OPTIONS).told is not None


def kept(*contents: str, scope: Scope = SCOPE, turns: Turns | None = None) -> Turns:
    turns = Turns() if turns is None else turns
    conversation = talk(*contents)
    told = TEMPLATES["chatml"].write(conversation, OPTIONS).told
    assert told is not None
    turns.keep(scope, told, None)
    return turns


def test_a_beginning_is_found_until_one_of_its_messages_changes() -> None:
    turns = kept("a", "b", "c", "d")
    assert turns.find(SCOPE, talk("a", "b", "c", "x", "y").messages) is not None
    assert turns.find(SCOPE, talk("a", "b", "c").messages) is None  # its last message is written anew
    for place in range(3):
        changed = ["a", "b", "c", "d", "e"]
        changed[place] = "x"
        assert turns.find(SCOPE, talk(*changed).messages) is None


def test_a_beginning_is_found_in_its_own_scope_alone() -> None:
    turns = kept("a", "b", "c", "d")
    assert turns.find(SCOPE._replace(digest=b"another"), talk("a", "b", "c", "d", "e").messages) is None


@pytest.mark.parametrize(
    "function", [{"name": "f", "strict": True}, {"strict": 1, "name": "f"}, {"name": "f", "strict": 1.0}]
)
def test_tools_that_only_look_equal_to_python_are_others(function: dict[str, object]) -> None:
    asked = Asked(OPTIONS, "", "namespace")
    known = asked.scope((Tool({"name": "f", "strict": 1}, 30),))
    assert known == asked.scope((Tool({"name": "f", "strict": 1}, 30),))
    assert known != asked.scope((Tool(function, 30),))


@pytest.mark.parametrize(
    "asked",
    [
        Asked(OPTIONS, "", "another"),
        Asked(OPTIONS, "{}", "namespace"),
        Asked(RenderOptions(add_generation_prompt=False), "", "namespace"),
    ],
)
def test_what_a_render_depends_on_makes_another_scope(asked: Asked) -> None:
    assert asked.scope(()) != Asked(OPTIONS, "", "namespace").scope(())


def test_beginnings_keep_to_their_room_and_the_oldest_goes_first() -> None:
    size = 3 * 1_000
    turns = Turns(max_bytes=40 * size)
    for number in range(100):
        kept(f"{number}", "b" * size, "c", "d", turns=turns)
    assert 1 < len(turns) < 40
    assert turns.find(SCOPE, talk("99", "b" * size, "c", "d", "e").messages) is not None
    assert turns.find(SCOPE, talk("0", "b" * size, "c", "d", "e").messages) is None


def test_one_that_is_too_large_is_not_kept() -> None:
    assert len(kept("a", "b" * 10_000, "c", "d", turns=Turns(max_bytes=10_000))) == 0


def test_a_beginning_gives_way_to_the_one_that_goes_on_from_it() -> None:
    turns = kept("a", "b", "c", "d")
    grown = talk("a", "b", "c", "d", "e", "f")
    told = turns.find(SCOPE, grown.messages)
    page = TEMPLATES["chatml"].write(grown, OPTIONS, told)
    assert page.told is not None
    turns.keep(SCOPE, page.told, told)
    assert len(turns) == 1
    assert turns.find(SCOPE, talk("a", "b", "c", "d", "e", "f").messages) is not None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    style = next(each for each in STYLES if each.name == "chatml")
    return model_files.load(style.write(tmp_path_factory.mktemp("chatml")))


@given(
    texts=st.lists(
        st.one_of(
            st.text(max_size=6), st.sampled_from(["<|im_end|>", "<|im_", "start|>", "x" * 60, "<|im_start|>user"])
        ),
        min_size=4,
        max_size=12,
    ),
    cuts=st.sets(st.integers(3, 11), max_size=4),
)
def test_control_text_is_told_apart_in_a_conversation_that_goes_on(
    files: ModelFiles, texts: list[str], cuts: set[int]
) -> None:
    assert files.template is not None
    one, other = (Renderer(files.template, files.tokenizer, OrderPolicy(), "encode") for _ in range(2))
    for end in sorted({*cuts, len(texts)}):
        conversation = talk(*texts[:end])
        assert one.render(conversation, OPTIONS, SCOPE) == other.render(conversation, OPTIONS)


@pytest.mark.parametrize(
    "message",
    [
        Message(Role.ASSISTANT, "a", reasoning="r" * 100_000),
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "[" + "1," * 30_000 + "1]", None, "c"),)),
    ],
)
def test_texts_that_the_template_does_not_show_take_room_too(message: Message) -> None:
    conversation = Conversation((*talk("a", "b").messages, message, *talk("c").messages))
    page = TEMPLATES["chatml"].write(conversation, OPTIONS)
    assert page.told is not None
    assert page.told.bytes > 100_000


def test_a_conversation_that_goes_on_has_the_limits_of_a_whole_one() -> None:
    tool = Tool({"name": "f", "description": "d" * 60_000}, 60_020)
    source = "{% for message in messages %}{{ message.content }}{{ tools | tojson }}{% endfor %}"
    template, turns = JinjaTemplate(source, {}), Turns()
    limited = 0
    for length in range(3, 60):
        conversation = replace(talk(*["text"] * length), tools=(tool,))
        told = turns.find(SCOPE, conversation.messages)
        page, whole = written(template, conversation, told), written(template, conversation)
        assert_same(page, whole)
        limited += isinstance(whole, str)
        if isinstance(page, Page) and page.told is not None:
            turns.keep(SCOPE, page.told, told)
    assert 0 < limited < 57


@pytest.mark.parametrize(("tag", "left"), [("tag", 1), ("other", 1), ("none", 2), (None, 0)])
def test_a_flush_forgets_the_conversations_of_its_namespace(tag: str | None, left: int) -> None:
    turns = kept("a", "b", "c", "d")
    kept("a", "b", "c", "d", scope=SCOPE._replace(tag="other"), turns=turns)
    turns.flush(tag)
    assert len(turns) == left


def test_a_chat_that_has_grown_is_told_from_one_that_is_asked_again() -> None:
    turns = kept("a", "b", "c")
    assert turns.may_go_on("tag", talk("a", "b", "c", "d", "e").messages)
    assert turns.may_go_on("tag", talk("a", "b", "other").messages)
    assert not turns.may_go_on("tag", talk("a", "b", "c").messages)
    assert not turns.may_go_on("another's", talk("a", "b", "c", "d", "e").messages)
    assert not turns.may_go_on("tag", talk("a", "x", "c", "d", "e").messages)
    turns.flush("tag")
    assert not turns.may_go_on("tag", talk("a", "b", "c", "d", "e").messages)
