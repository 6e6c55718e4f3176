"""A prompt as the command line gives it: a message, a file of messages, or raw text."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes.cli import options as opt
from hermes.cli.console import fail, text_or_stdin
from hermes.client import PromptOptions


@dataclass(frozen=True, slots=True)
class Given:
    """messages: None where the options have raw text."""

    messages: list[Mapping[str, Any]] | None
    options: PromptOptions


def given(
    message: str | None,
    *,
    conversation: Path | None,
    system: str | None,
    tools: Path | None,
    raw: bool,
    namespace: str | None = None,
    max_prompt_tokens: int | None = None,
) -> Given:
    """What is to be sent. Leaves the process where that is none.

    message: a user message, after those of the file of a conversation where there is one; raw: it is text.
    """
    options: PromptOptions = {"namespace": namespace, "max_prompt_tokens": max_prompt_tokens}
    if raw:
        if system is not None:
            fail("--raw takes the text as it is, so there is no place for --system.", code=2)
        if conversation is not None or tools is not None:
            fail("--raw takes the text as it is, so there is no place for --messages and --tools.", code=2)
        if message is None:
            fail("--raw needs a text.", code=2)
        return Given(None, {**options, "text": text_or_stdin(message)})
    if message is None and conversation is None:
        fail('Give a message, as in "Hello", - to read it from standard input, or --messages FILE.', code=2)
    told = [] if conversation is None else _messages(conversation)
    if message is not None:
        told.append({"role": "user", "content": text_or_stdin(message)})
    return Given(told, {**options, "system": system, "tools": opt.functions(tools)})


def _messages(file: Path) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}.", code=2)
    except ValueError as error:
        fail(f"{file} is not JSON: {error}.", code=2)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        fail(f'{file} has to be a JSON array of messages, such as [{{"role": "user", "content": "Hello"}}].', code=2)
    return found
