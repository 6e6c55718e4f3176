"""What a log line looks like, and what never gets into one."""

import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from shared import logs

log = logging.getLogger("shared.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = (
        logging.getLogger(),
        [logging.getLogger(name) for name in ("__main__", "assembler", "executor", "hermes", "shared")],
    )
    before = root.handlers[:], root.level, [each.level for each in ours]
    root.handlers = []  # basicConfig(force=True) closes what it finds, and pytest still needs its own
    yield
    logging.captureWarnings(False)
    root.handlers = before[0]
    root.setLevel(before[1])
    for each, level in zip(ours, before[2], strict=True):
        each.setLevel(level)


def test_a_human_line_has_time_level_service_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "human", "executor")
    log.info("ready on %s", "127.0.0.1:1")
    assert " INFO    executor | ready on 127.0.0.1:1\n" in capsys.readouterr().err


def test_a_json_line_carries_extra_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "assembler")
    log.warning("größer %d", 1, extra={"method": "/a/B", "ms": 1.5})
    entry = json.loads(capsys.readouterr().err)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "service": "assembler",
        "logger": "shared.test",
        "message": "größer 1",
        "method": "/a/B",
        "ms": 1.5,
    }


def test_a_json_line_stays_one_line_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "assembler")
    try:
        {}["x"]
    except KeyError:
        log.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "Traceback" in json.loads(line)["exception"]


@pytest.mark.parametrize(("terminal", "coloured"), [(True, True), (False, False)])
def test_colours_are_for_terminals(
    terminal: bool, coloured: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logs.configure("info", "human", "executor")
    log.error("broken")
    assert ("\x1b[31m" in capsys.readouterr().err) is coloured


@pytest.mark.parametrize(("terminal", "start"), [(True, ""), (False, "{")])
def test_auto_is_json_where_nobody_looks(
    terminal: bool, start: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logs.configure("info", "auto", "executor")
    log.info("hello")
    line = capsys.readouterr().err
    assert "hello" in line
    assert line.startswith("{") is (start == "{")


def test_the_level_is_for_our_own_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "human", "executor")
    log.debug("ours")
    logging.getLogger("somelibrary").info("theirs")
    logging.getLogger("somelibrary").warning("their worry")
    text = capsys.readouterr().err
    assert "ours" in text
    assert "their worry" in text
    assert "| theirs" not in text


def test_python_warnings_become_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.configure("info", "human", "executor")
        warnings.warn("old thing", UserWarning, stacklevel=1)
    assert "old thing" in capsys.readouterr().err


def test_a_traceback_without_text_names_types_and_places_only() -> None:
    def inner() -> None:
        raise ValueError("the caller's prompt")

    try:
        try:
            inner()
        except ValueError as error:
            raise KeyError("more prompt") from error
    except KeyError as error:
        text = logs.without_text(error)
    assert "builtins.KeyError" in text
    assert "builtins.ValueError" in text
    assert "in inner" in text
    assert "caller's prompt" not in text.replace('raise ValueError("the caller\'s prompt")', "")
    assert "more prompt" not in text.replace('raise KeyError("more prompt")', "")
