"""`hermes explain`, and what it and `hermes assemble` take as a prompt."""

import io
import json
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from hermes import cli
from hermes.cli import explain as command
from hermes.cli.pieces import LEGEND
from hermes.cli.visible import escaped, visible
from hermes.v1 import assembler_pb2
from shared.errors import invalid_argument

Segment = assembler_pb2.Segment
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi\n\x1b[31mred"},
    {"role": "assistant", "content": "你好"},
]


def piece(text: str, *ids: int, index: int | None = None, **fields: object) -> Segment:
    fields.setdefault("kind", Segment.KIND_TEMPLATE if index is None else Segment.KIND_CONTENT)
    return Segment(text=text, token_ids=ids, message_index=index, **fields)  # type: ignore[arg-type]


def explained(*segments: Segment, tree: int | None = None, **info: object) -> assembler_pb2.ExplainResponse:
    return assembler_pb2.ExplainResponse(
        text="".join(each.text for each in segments),
        segments=segments,
        info=assembler_pb2.AssemblyInfo(**info),  # type: ignore[arg-type]
        tree_cached_tokens=tree,
        request_id="r1",
    )


EXPLAINED = explained(
    piece("<|im_start|>", 1, control=True, cached_tokens=1, tree_cached_tokens=1),
    piece("system\n", 9690, 198, cached_tokens=2, tree_cached_tokens=2),
    piece("Be brief.", 6077, 5453, 30, index=0, cached_tokens=3, tree_cached_tokens=1),
    piece(" Hi\n\x1b[31mred", 7, 8, index=1, other_before=1),
    piece("f{}", 5, index=2, kind=Segment.KIND_TOOL_CALL),
    piece("你好", 10, 11, index=2),
    piece('{"name": "f"}', 12, kind=Segment.KIND_TOOLS),
    tree=4,
    cached_tokens=6,
    dropped_rounds=2,
    warnings=[
        assembler_pb2.Warning(code="DYNAMIC_PREFIX", message="It has a \x1b[2J date.", remedy="Move it.", tokens=40),
    ],
)


@pytest.fixture
def hermes(assembler, monkeypatch, capsys):
    """Runs the command line against the fake assembler; returns exit code, standard output, standard error."""
    assembler.explained = EXPLAINED

    def run(*arguments: str, stdin: str = ""):
        monkeypatch.setenv("HERMES_ADDRESS", assembler.address)
        monkeypatch.setattr(sys, "argv", ["hermes", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def conversation(tmp_path):
    file = tmp_path / "conversation.json"
    file.write_text(json.dumps(CONVERSATION))
    return str(file)


def test_each_piece_is_a_row_that_tells_whose_it_is_and_what_is_cached(hermes, conversation):
    code, out, err = hermes("explain", "--messages", conversation)
    assert code == 0
    rows = [line.split(maxsplit=5) for line in out.splitlines()]
    assert rows[1:4] == [
        ["█", "█", "0", "1", "control", "<|im_start|>"],
        ["█", "█", "1", "2", "template", "system⏎"],
        ["█", "▌", "3", "3", "0", "system      Be brief."],
    ]
    assert "· ·       6      2  1 user         Hi⏎\n" + " " * 34 + "␛[31mred\n" in out
    assert "· ·       8      1  2 call        f{}\n" in out
    assert "· ·       9      2  2 assistant   你好\n" in out
    assert '· ·      11      1  tools         {"name": "f"}\n' in out
    assert re.search(r"assembly cache  █{16}░{16}  6 of 12 tokens", out)
    assert re.search(r"prefix tree     █{10}░{22}  4 of 12 tokens", out)
    assert "12 tokens in 7 pieces, 2 oldest rounds left out" in err


def test_warnings_come_last_with_what_to_do(hermes):
    _, _, err = hermes("explain", "Hi")
    assert err.splitlines()[-2:] == [
        "warning: It has a ␛[2J date. [DYNAMIC_PREFIX]",
        "  Move it.",
    ]


def test_ids_are_shown_when_asked_for(hermes):
    assert "9690 198" not in hermes("explain", "Hi")[1]
    assert "system⏎\n" + " " * 34 + "9690 198\n" in hermes("explain", "Hi", "--ids")[1]


def test_a_tree_that_nobody_could_ask_is_unknown(hermes, assembler):
    assembler.explained = explained(piece("a", 1, index=0))
    _, out, _ = hermes("explain", "a")
    assert "· ?       0      1  0 user        a\n" in out
    assert "prefix tree     not known: no executor answered" in out


def test_json_is_one_object_that_a_terminal_does_not_obey(hermes):
    code, out, _ = hermes("explain", "Hi", "--json")
    told = json.loads(out)
    assert code == 0
    assert "".join(each["text"] for each in told["segments"]) == told["text"] == EXPLAINED.text
    assert told["segments"][3] == {
        "text": " Hi\n\x1b[31mred", "token_ids": [7, 8], "kind": "content", "message_index": 1, "control": False,
        "other_before": 1, "other_after": 0, "cached_tokens": 0, "tree_cached_tokens": 0,
    }  # fmt: skip
    assert told["tree_cached_tokens"] == 4
    assert told["assembly"]["warnings"][0]["remedy"] == "Move it."
    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in out.rstrip("\n"))


def test_long_texts_and_prompts_are_shortened_unless_asked_for_whole(hermes, assembler):
    words = " ".join(f"word{place}" for place in range(20_000))
    texts = [piece(words, *range(20_000), index=0), *(piece(f"<{place}>", place, control=True) for place in range(500))]
    assembler.explained = explained(*texts)
    _, out, _ = hermes("explain", "Hi", "--ids")
    assert len(out) < 30_000
    assert f"… {len(words) - 280} characters …" in out
    assert "… 381 pieces with 381 tokens; --full shows them …" in out
    assert "<0>" in out
    assert "<499>" in out
    assert "<250>" not in out
    _, whole, _ = hermes("explain", "Hi", "--full", "--ids")
    letters = "".join(line[34:] for line in whole.splitlines())
    assert "word9999" in letters
    assert "<250>" in whole


def test_no_line_is_wider_than_a_terminal_of_80_columns(hermes, assembler):
    texts = ["x" * 1000, "你好" * 100, "\u202e" * 99, "word " * 300, "\n" * 40, "🎉👩‍👩‍👧" * 30]
    assembler.explained = explained(
        *(piece(text, *range(90_000, 90_050), index=place) for place, text in enumerate(texts)), tree=3
    )
    _, out, _ = hermes("explain", "Hi", "--full", "--ids")
    assert max(map(cell_len, out.splitlines())) <= 80
    assert len(LEGEND) <= 80
    for text in texts[:2]:
        assert text in "".join(line[34:] for line in out.splitlines())


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_colours_unless_it_wants_none(hermes, monkeypatch, variables, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system="standard", width=80, soft_wrap=True)
    monkeypatch.setattr(command, "out", terminal)
    assert hermes("explain", "Hi")[0] == 0
    assert ("\x1b[36m" in screen.getvalue()) is coloured
    assert "\x1b[31mred" not in screen.getvalue()


def test_a_prompt_is_a_message_after_those_of_a_file(hermes, assembler, conversation, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "f"}]')
    options = ("--messages", conversation, "--tools", str(tools), "--namespace", "n", "--max-prompt-tokens", "90")
    for verb in ("explain", "assemble"):
        assert hermes(verb, "And then?", *options)[0] == 0
        request = assembler.requests[-1]
        contents = [each.content for each in request.prompt.chat.messages]
        assert contents == [*(each["content"] for each in CONVERSATION), "And then?"]
        assert request.prompt.chat.tools[0].function_json == '{"name": "f"}'
        assert request.cache.namespace == "n"
        assert request.truncation.max_prompt_tokens == 90
    assert hermes("explain", "--messages", "-", stdin=json.dumps(CONVERSATION))[0] == 0
    assert len(assembler.requests[-1].prompt.chat.messages) == 3
    assert hermes("explain", "as it is", "--raw")[0] == 0
    assert assembler.requests[-1].prompt.text == "as it is"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Give a message"),
        (("--raw",), "--raw needs a text"),
        (("x", "--raw", "--system", "s"), "--system"),
        (("x", "--raw", "--messages", "f"), "--messages"),
        (("--messages", "no/such/file"), "No such file"),
        (("--messages", "-"), "is not JSON"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "assemble"])
def test_a_prompt_that_is_none_is_wrong_usage(hermes, assembler, verb, arguments, said):
    code, out, err = hermes(verb, *arguments, stdin="{")
    assert (code, out) == (2, "")
    assert said in err
    assert not assembler.requests


@pytest.mark.parametrize("found", ['{"role": "user"}', "[]", '["text"]'])
def test_a_file_without_messages_is_wrong_usage(hermes, found):
    code, _, err = hermes("explain", "--messages", "-", stdin=found)
    assert code == 2
    assert "array of messages" in err


def test_a_refused_prompt_is_a_sentence(hermes, assembler):
    assembler.error = invalid_argument("UNKNOWN_ROLE", "Message 0 has the unknown role 'king'.")
    code, out, err = hermes("explain", "Hi")
    assert (code, out) == (1, "")
    assert "unknown role" in err


def test_whatever_a_terminal_would_obey_is_shown_instead():
    assert visible("a\x00\x1b\x7f\x9b\u202e\u2028\ufeffé你\n") == "a␀␛␡\\u009b\\u202e\\u2028\\ufeffé你␊"
    for code in range(0x11000):
        shown = visible(chr(code))
        assert all(letter.isprintable() or letter == "\u3000" or letter.isspace() for letter in shown) or code > 0x2FF
        assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in shown)
    text = json.dumps("\x9b\U000e0001\u202e é", ensure_ascii=False)
    assert json.loads(escaped(text)) == "\x9b\U000e0001\u202e é"
    assert escaped(text).isprintable()
