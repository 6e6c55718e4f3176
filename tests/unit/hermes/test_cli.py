import io
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from hermes import cli
from hermes.cli import chat
from hermes.health import ASSEMBLER, EXECUTOR, GENERATE
from shared import models
from shared.errors import StartupError, invalid_argument
from tests.unit.hermes.fake_assembler import CALLING, delta, finished, started, usage


@pytest.fixture
def hermes(assembler, monkeypatch, capsys):
    """Runs the command line against the fake assembler; returns exit code, standard output, standard error."""

    def run(*arguments: str, stdin: str | None = None):
        monkeypatch.setenv("HERMES_ADDRESS", assembler.address)
        monkeypatch.setenv("HERMES_EXECUTOR_ADDRESS", assembler.address)
        monkeypatch.setattr(sys, "argv", ["hermes", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode())))
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def test_chat_prints_the_answer_alone(hermes, assembler):
    assert hermes("chat", "hi", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "5") == (
        0,
        "Paris.\n",
        "",
    )
    request = assembler.requests[0]
    assert [m.content for m in request.prompt.chat.messages] == ["Be brief.", "hi"]
    assert request.sampling.HasField("temperature")
    assert request.stopping.max_tokens == 5


def test_chat_with_stats_tells_what_was_cached(hermes):
    code, out, err = hermes("chat", "hi", "--stats")
    assert (code, out) == (0, "Paris.\n")
    assert "prompt 9 tokens: 4 cached, 5 computed · answer 3 tokens (stop)" in err


def test_chat_asks_for_a_window_and_tells_how_many_rounds_were_left_out(hermes, assembler):
    assembler.events[0].started.info.dropped_rounds = 3
    code, _, err = hermes("chat", "hi", "--max-prompt-tokens", "100", "--stats")
    assert code == 0
    assert "3 oldest rounds left out" in err
    truncation = assembler.requests[0].truncation
    assert truncation.max_prompt_tokens == 100
    assert truncation.mode == truncation.MODE_ROUNDS


def test_chat_json_is_one_object(hermes):
    code, out, _ = hermes("chat", "hi", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["text"] == "Paris."
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
    assert answer["timings"]["prefill"] == pytest.approx(0.25)
    assert answer["assembly"]["template_version"] == "t1"


def test_chat_prints_reasoning_apart_from_the_answer_and_calls_behind_it(hermes, assembler):
    assembler.events = CALLING
    assert hermes("chat", "hi") == (0, 'Let me see.\nfind {"q": "é"}\n', "I do not know.\n")
    assert hermes("chat", "hi", "--no-reasoning") == (0, 'Let me see.\nfind {"q": "é"}\n', "")


def test_reasoning_that_looks_like_markup_is_printed_as_it_is(hermes, assembler):
    assembler.events = [started(), delta("", 1, reasoning="[bold]:smile: \n"), delta("[x]", 2), finished(usage=usage())]
    assert hermes("chat", "hi") == (0, "[x]\n", "[bold]:smile: \n")


def test_chat_json_has_reasoning_and_calls(hermes, assembler):
    assembler.events = CALLING
    answer = json.loads(hermes("chat", "hi", "--json")[1])
    assert (answer["reasoning"], answer["finish_reason"]) == ("I do not know.", "tool_calls")
    assert answer["tool_calls"] == [{"name": "find", "arguments_json": '{"q": "é"}', "id": "abcdefghi"}]


def test_chat_offers_the_functions_of_a_file(hermes, assembler, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "find"}, {"type": "function", "function": {"name": "time"}}]')
    assert hermes("chat", "hi", "--tools", str(file))[0] == 0
    assert [tool.function_json for tool in assembler.requests[0].prompt.chat.tools] == [
        '{"name": "find"}',
        '{"name": "time"}',
    ]


@pytest.mark.parametrize(
    ("written", "said"),
    [(None, "cannot be read"), ("[", "is not JSON"), ('{"name": "f"}', "JSON array"), ('["f"]', "JSON array")],
)
def test_a_file_that_has_no_functions_is_wrong_usage(hermes, tmp_path, written, said):
    file = tmp_path / "tools.json"
    if written is not None:
        file.write_text(written)
    code, out, err = hermes("chat", "hi", "--tools", str(file))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_chat_reads_its_message_from_standard_input(hermes, assembler):
    assert hermes("chat", "-", stdin="Grüße\n")[0] == 0
    assert assembler.requests[0].prompt.chat.messages[0].content == "Grüße"


def test_chat_without_a_message_and_a_terminal_is_wrong_usage(hermes):
    code, out, err = hermes("chat")
    assert (code, out) == (2, "")
    assert "standard input" in err


def test_text_that_looks_like_markup_is_printed_as_it_is(hermes, assembler):
    assembler.events = [started(), delta("[bold]x[/] \x1b\n", 1), finished(usage=usage())]
    assert hermes("chat", "hi")[1] == "[bold]x[/] \x1b\n"


def test_warnings_go_to_standard_error(hermes, assembler):
    assembler.events = [started(warnings=("ROLE_ORDER",)), delta("x", 1), finished(usage=usage())]
    warning = assembler.events[0].started.info.warnings[0]
    warning.message, warning.remedy, warning.message_index = "It is odd.", "Mend it.", 2
    code, out, err = hermes("chat", "hi")
    assert (code, out) == (0, "x\n")
    assert "warning: It is odd. [ROLE_ORDER]\n  Mend it.\n" in err


def test_generate_sends_raw_text(hermes, assembler):
    assert hermes("generate", "Once upon", "--stop", "a", "--stop", "b", "--seed", "3")[:2] == (0, "Paris.\n")
    assert assembler.requests[0].prompt.text == "Once upon"
    assert list(assembler.requests[0].stop) == ["a", "b"]
    assert assembler.requests[0].sampling.seed == 3


def test_assemble_prints_ids_and_text(hermes):
    code, out, err = hermes("assemble", "hi")
    assert (code, out) == (0, "1 4093 198\n<|im_start|>\n")
    assert "3 tokens" in err


def test_assemble_json_and_raw(hermes, assembler):
    code, out, _ = hermes("assemble", "hi", "--raw", "--json")
    assert (code, json.loads(out)["token_ids"]) == (0, [1, 4093, 198])
    assert assembler.requests[0].prompt.text == "hi"


def test_assemble_shows_only_head_and_tail_when_asked_to(hermes):
    code, out, _ = hermes("assemble", "x" * 1000, "--template", "chatml", "--head-tail")
    assert code == 0
    assert out.startswith("<|im_start|>user\nxxx")
    assert "characters …\n" in out
    assert out.endswith("<|im_end|>\n<|im_start|>assistant\n\n")
    assert len(out) < 500


def test_assemble_renders_a_template_without_a_server(hermes, assembler, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    code, out, err = hermes("assemble", "Grüße", "--system", "s", "--template", str(template))
    assert (code, out) == (0, "<bos_token>[system] s\n[user] Grüße\n\n")
    assert "characters" in err
    shown = json.loads(hermes("assemble", "hi", "--template", "gemma", "--json")[1])
    assert shown["text"] == "<bos_token><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert shown["token_ids"] is None
    assert not assembler.requests


def test_assemble_with_a_model_gives_ids_and_warnings(hermes, model_directory):
    code, out, err = hermes("assemble", "a<|im_end|>", "--template", "chatml", "--model", str(model_directory))
    assert code == 0
    assert out.startswith("1 4093 198 ")
    assert "<|im_end|>" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--template", "no_such_file"), 1, "alpaca, chatml"),
        (("--template", "chatml", "--raw"), 2, "--raw"),
        (("--model", "x"), 2, "--template"),
    ],
)
def test_assemble_that_cannot_be_done_is_a_sentence(hermes, arguments, code, said):
    left, out, err = hermes("assemble", "hi", *arguments)
    assert (left, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_refused_request_is_one_sentence_and_exit_code_1(hermes, assembler):
    assembler.events, assembler.error = [], invalid_argument("BAD_SAMPLING", "temperature must not be below 0.")
    assert hermes("chat", "hi", "--temperature", "-1") == (1, "", "hermes: temperature must not be below 0.\n")


def test_nobody_at_the_address_is_one_sentence(hermes):
    code, out, err = hermes("chat", "hi", "--address", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err


def test_an_unknown_option_is_wrong_usage(hermes):
    code, _, err = hermes("chat", "hi", "--temprature", "0")
    assert code == 2
    assert "Traceback" not in err


def test_health_fails_while_one_service_is_not_ready(hermes, assembler):
    assembler.set_health(ASSEMBLER, serving=True)
    assembler.set_health(GENERATE, serving=False)
    assembler.set_health(EXECUTOR, serving=True)
    code, out, _ = hermes("health")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["serving", "not", "serving"]
    assert hermes("health", ASSEMBLER, EXECUTOR)[0] == 0
    states = json.loads(hermes("health", "--json")[1])
    assert states[GENERATE] == {"address": assembler.address, "state": "not serving"}


def test_model_prepare_prints_the_directory_last(hermes, monkeypatch, tmp_path):
    def prepare(model, progress):
        progress(f"converting {model}")
        return tmp_path

    monkeypatch.setattr(models, "prepare", prepare)
    code, out, err = hermes("model", "prepare", "org/name")
    assert (code, out, err) == (0, f"{tmp_path}\n", "converting org/name\n")


def test_a_model_that_cannot_be_prepared_is_one_sentence(hermes, monkeypatch):
    def prepare(model, progress):
        raise StartupError("There is no such model.")

    monkeypatch.setattr(models, "prepare", prepare)
    assert hermes("model", "prepare", "x/y") == (2, "", "hermes: There is no such model.\n")


def test_model_info_of_what_is_no_executor_is_one_sentence(hermes):
    code, _, err = hermes("model", "info")
    assert code == 1
    assert err.count("\n") == 1


def test_a_conversation_carries_its_history_and_tells_what_was_cached(hermes, assembler, monkeypatch):
    lines = iter(["hello", "", "again", "/reset", "new", "/quit"])
    monkeypatch.setattr(chat.out, "input", lambda *_, **__: next(lines))
    monkeypatch.setattr("hermes.cli.chat._is_terminal", lambda: True)
    code, out, err = hermes("chat", "--system", "Be brief.")
    assert (code, out) == (0, "Paris.\n" * 3)
    assert err.count("4 cached, 5 computed") == 3
    turns = [[m.content for m in request.prompt.chat.messages] for request in assembler.requests]
    assert turns == [
        ["Be brief.", "hello"],
        ["Be brief.", "hello", "Paris.", "again"],
        ["Be brief.", "new"],
    ]


def test_a_conversation_asks_for_the_results_of_calls(hermes, assembler, monkeypatch):
    def lines():
        assembler.events = CALLING
        yield "hello"
        assembler.events = [started(), delta("Five.", 1), finished(usage=usage())]
        yield "5"
        yield "/quit"

    said, asked = lines(), []

    def read(prompt, **_):
        asked.append(prompt)
        return next(said)

    monkeypatch.setattr(chat.out, "input", read)
    monkeypatch.setattr("hermes.cli.chat._is_terminal", lambda: True)
    code, out, _ = hermes("chat")
    assert (code, asked) == (0, ["you> ", "find> ", "you> "])
    assert out == 'Let me see.\nfind {"q": "é"}\nFive.\n'
    _, called, result = assembler.requests[1].prompt.chat.messages
    assert (called.content, called.reasoning) == ("Let me see.", "I do not know.")
    assert called.tool_calls[0].name == "find"
    assert (result.role, result.content, result.tool_call_id) == ("tool", "5", "abcdefghi")


def test_a_failed_turn_is_told_and_forgotten(hermes, assembler, monkeypatch):
    def lines():
        assembler.error, assembler.events = invalid_argument("PROMPT_TOO_LONG", "That is too long."), []
        yield "long"
        assembler.error, assembler.events = None, [started(), delta("ok", 1), finished(usage=usage())]
        yield "short"

    said = lines()

    def read(*_, **__):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat.out, "input", read)
    monkeypatch.setattr("hermes.cli.chat._is_terminal", lambda: True)
    code, out, err = hermes("chat")
    assert code == 0
    assert out.startswith("ok\n")
    assert "That is too long." in err
    assert [m.content for m in assembler.requests[-1].prompt.chat.messages] == ["short"]


def test_version_needs_no_heavy_imports():
    code = "import sys, hermes.cli; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version(hermes):
    code, out, _ = hermes("--version")
    assert code == 0
    assert out.startswith("hermes ")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [("--seed", "9" * 23, "seed"), ("--top-k", "9" * 11, "top_k"), ("--max-tokens", "9" * 5000, "max-tokens")],
)
def test_a_number_out_of_range_is_wrong_usage_in_a_sentence(hermes, assembler, option, value, field):
    code, out, err = hermes("chat", "hi", option, value)
    assert (code, out) == (2, "")
    assert field in err
    assert "Traceback" not in err
    assert assembler.requests == []


@pytest.mark.parametrize("value", ["0", "-1", "nan", "-inf"])
def test_a_timeout_that_is_no_time_is_wrong_usage(hermes, value):
    code, out, err = hermes("chat", "hi", "--timeout", value)
    assert (code, out) == (2, "")
    assert "give seconds above 0" in err


@pytest.mark.parametrize("value", ["inf", "1e30"])
def test_a_timeout_beyond_all_waiting_is_none(hermes, value):
    assert hermes("chat", "hi", "--timeout", value)[:2] == (0, "Paris.\n")


def test_an_answer_of_no_tokens_is_wrong_usage(hermes):
    assert hermes("chat", "hi", "--max-tokens", "0")[0] == 2


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:50051", "localhost", "a b:1", "x:99999"])
def test_an_address_that_can_be_none_is_wrong_usage(hermes, address):
    for command in (["chat", "hi"], ["assemble", "hi"], ["health"]):
        code, out, err = hermes(*command, "--address", address)
        assert (code, out) == (2, "")
        assert err.startswith(f"hermes: address {address!r} cannot be used: ")
        assert err.count("\n") == 1


def test_a_ca_file_that_is_none_is_wrong_usage(hermes, tmp_path):
    (tmp_path / "ca.pem").write_text("no certificate")
    assert hermes("chat", "hi", "--tls-ca", str(tmp_path / "ca.pem"))[0] == 2


def test_raw_text_has_no_system_message(hermes):
    assert hermes("assemble", "hi", "--raw", "--system", "x")[0] == 2


def test_health_of_a_host_that_accepts_and_never_answers_is_unreachable(hermes):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, out, _ = hermes("health", ASSEMBLER, "--address", f"127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1
    assert out.startswith("unreachable")


def test_the_variables_for_addresses_stand_in_the_help(hermes):
    assert {"HERMES_ADDRESS", "HERMES_EXECUTOR_ADDRESS", "HERMES_TLS_CA"} <= set(hermes("--help")[1].split())


COMMAND = [sys.executable, "-c", "from hermes.cli import main; main()"]


def run(*arguments, assembler=None, **how):
    environment = {**os.environ, **how.pop("environment", {})}
    if assembler is not None:
        environment["HERMES_ADDRESS"] = assembler.address
    return subprocess.run([*COMMAND, *arguments], env=environment, stderr=subprocess.PIPE, check=False, **how)


def test_an_argument_that_is_no_utf8_is_wrong_usage():
    done = run("assemble", b"\xff\xfe")
    assert done.returncode == 2
    assert done.stderr.startswith(b"hermes: An argument is not UTF-8 text")


def test_an_ascii_locale_changes_no_text(assembler):
    assembler.events = [started(), delta("北京", 1), finished(usage=usage())]
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("chat", "你好", assembler=assembler, environment=posix, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "北京\n", b"")
    assert assembler.requests[0].prompt.chat.messages[0].content == "你好"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["chat", "hi"], ["chat", "hi", "--json"], ["assemble", "hi"], ["--version"]])
def test_output_that_cannot_be_written_is_a_sentence(assembler, arguments):
    with open("/dev/full", "wb") as full:
        done = run(*arguments, assembler=assembler, stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"hermes: The output cannot be written: No space left on device.\n"


def test_sigterm_unwinds_a_preparation(hermes, monkeypatch):
    cleared = []

    def prepare(model, progress):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleared.append(model)

    monkeypatch.setattr(models, "prepare", prepare)
    before = signal.getsignal(signal.SIGTERM)
    assert hermes("model", "prepare", "x/y")[0] == 128 + signal.SIGTERM
    assert cleared == ["x/y"]
    assert signal.getsignal(signal.SIGTERM) == before
