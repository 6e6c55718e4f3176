"""Where the command line reads and writes: answers on standard output, everything about them on standard error."""

import codecs
import io
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

import typer
from rich.console import Console

from hermes.answers import Answer, AssemblyInfo
from hermes.cli.visible import escaped, visible

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

STDIN = "-"

Json = dict[str, object]


def fail(sentence: str, code: int = 1) -> NoReturn:
    """Prints why and leaves the process."""
    with suppress(OSError):  # standard error may be what failed; the exit code tells enough
        complain(sentence)
    sys.exit(code)


def complain(sentence: str) -> None:
    """A line on standard error about what does not work."""
    err.print(f"hermes: {sentence}", style="red", markup=False)


def speak_utf8() -> None:
    """Reads and writes UTF-8 where the locale knows ASCII alone; text that no other one has gets a question mark."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = codecs.lookup(stream.encoding).name == "ascii"
            writes = stream is not sys.stdin
            stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace" if writes else None)


def utf8_arguments(arguments: list[str]) -> list[str]:
    """The arguments as UTF-8, whatever the locale took their bytes for. Leaves the process where they are not."""
    try:
        return [os.fsencode(argument).decode() for argument in arguments]
    except UnicodeError:
        fail("An argument is not UTF-8 text; pass text of another kind through standard input, as UTF-8.", code=2)


def note(text: str) -> None:
    """A quiet line on standard error."""
    err.print(text, style="dim", markup=False)


def write(text: str) -> None:
    """Answer text on standard output, at once and as it is."""
    out.file.write(text)
    out.file.flush()


def think(text: str) -> None:
    """Reasoning on standard error, dimmed, as it comes."""
    err.print(text, style="dim", markup=False, emoji=False, end="")


def print_json(value: Json) -> None:
    """One object on one line, for programs; characters that a terminal would obey are escaped in it."""
    typer.echo(escaped(json.dumps(value, ensure_ascii=False)))


def text_or_stdin(text: str) -> str:
    """The text, or all of standard input for `-`, less the newline that most programs end with."""
    if text != STDIN:
        return text
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        fail("Standard input is not UTF-8 text.")


def warn_about(info: AssemblyInfo) -> None:
    """What the assembler found odd about the prompt."""
    for warning in info.warnings:
        err.print(visible(f"warning: {warning.message} [{warning.code}]"), style="yellow", markup=False, emoji=False)
        if warning.remedy:
            err.print(f"  {visible(warning.remedy)}", style="yellow", markup=False, emoji=False)


def stats_of(answer: Answer) -> str:
    """What an answer cost, in one line."""
    prompt, completion, cached = answer.usage
    first = "" if answer.time_to_first_token is None else f" · first token after {answer.time_to_first_token:.2f} s"
    dropped = f" · {answer.info.dropped_rounds} oldest rounds left out" if answer.info.dropped_rounds else ""
    return (
        f"prompt {prompt} tokens: {cached} cached, {prompt - cached} computed{dropped} · "
        f"answer {completion} tokens ({answer.finish_reason}){first}"
    )


def json_of(answer: Answer) -> Json:
    """An answer as one JSON object; times in seconds."""
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [asdict(call) for call in answer.tool_calls],
        "finish_reason": answer.finish_reason,
        "token_ids": answer.token_ids,
        "model": answer.model,
        "request_id": answer.request_id,
        "usage": answer.usage._asdict(),
        "assembly": json_of_info(answer.info),
        "timings": answer.timings._asdict(),
        "time_to_first_token": answer.time_to_first_token,
    }


def json_of_info(info: AssemblyInfo) -> Json:
    """How a prompt came to be, as JSON."""
    return {
        "cached_tokens": info.cached_tokens,
        "dropped_rounds": info.dropped_rounds,
        "template_version": info.template_version,
        "tokenizer_fingerprint": info.tokenizer_fingerprint,
        "warnings": [warning._asdict() for warning in info.warnings],
        "timings": info.timings._asdict(),
    }
