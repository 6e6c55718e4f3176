"""Options that several commands share, and what they become."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hermes.arguments import seconds
from hermes.cli.console import fail
from hermes.client import GenerateOptions
from shared.errors import HermesError


def _seconds(value: float | None) -> float | None:
    try:
        return seconds(value)
    except HermesError:
        raise typer.BadParameter(f"{value:g} is no time to wait: give seconds above 0.") from None


Address = Annotated[str, typer.Option("--address", envvar="HERMES_ADDRESS", metavar="HOST:PORT", help="The assembler.")]
ExecutorAddress = Annotated[
    str, typer.Option("--executor", envvar="HERMES_EXECUTOR_ADDRESS", metavar="HOST:PORT", help="The executor.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="HERMES_TLS_CA", metavar="FILE", help="Encrypt, and trust these certificates."),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", callback=_seconds, help="Give up after this time; inf never does."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]

UserMessage = Annotated[
    str | None,
    typer.Argument(metavar="MESSAGE", help="A user message; - reads it from standard input.", show_default=False),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message before the others.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="End the answer after so many tokens.")
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens",
        metavar="N",
        min=1,
        help="Leave out the oldest rounds of a chat that is longer.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="X", help="0 always takes the likeliest token.")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="X", help="Choose among the likeliest tokens of this total.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", min=0, help="Choose among so many likeliest tokens; 0 is all.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Draw the same tokens again.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.")
]
Tools = Annotated[
    Path | None,
    typer.Option("--tools", metavar="FILE", help="Functions that the model may call: a JSON array of descriptions."),
]
Conversation = Annotated[
    Path | None,
    typer.Option("--messages", metavar="FILE", help="A conversation: a JSON array of messages; - is standard input."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Take the message as raw text, without a chat template.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Whose cached work the prompt may share.")
]
Reasoning = Annotated[
    bool, typer.Option("--reasoning/--no-reasoning", help="Show reasoning, dimmed, on standard error.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Also print tokens and times.")]


def functions(file: Path | None) -> list[str | Mapping[str, Any]]:
    """The descriptions in a file of functions; none without a file. Leaves the process where it cannot be read."""
    if file is None:
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}.", code=2)
    except ValueError as error:
        fail(f"{file} is not JSON: {error}.", code=2)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        fail(f"{file} has to be a JSON array of functions, each an object with a name.", code=2)
    return found


def sampling(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> GenerateOptions:
    """The options of a call that a command line sets."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
