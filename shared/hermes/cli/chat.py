"""`hermes chat` and `hermes generate`: one answer as it comes, or a conversation."""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from hermes.cli import options as opt
from hermes.cli.console import (
    err,
    fail,
    json_of,
    note,
    out,
    print_json,
    stats_of,
    text_or_stdin,
    think,
    warn_about,
    write,
)
from hermes.client import DEFAULT_ADDRESS, Answer, AnswerStream, Client, GenerateOptions, Message
from shared.errors import HermesError

_PROMPT = "you> "
_LEAVE = {"/quit", "/exit", "/q"}
_RESET = "/reset"


def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="What to say; - reads it from standard input. Left out on a terminal: a conversation.",
        ),
    ] = None,
    *,
    system: opt.System = None,
    tools: opt.Tools = None,
    reasoning: opt.Reasoning = True,
    max_tokens: opt.MaxTokens = None,
    max_prompt_tokens: opt.MaxPromptTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    as_json: opt.AsJson = False,
    stats: opt.Stats = False,
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Say something to the model and print its answer as it comes."""
    options = opt.sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    options["system"] = system
    options["tools"] = opt.functions(tools)
    options["max_prompt_tokens"] = max_prompt_tokens
    if message is None and not _is_terminal():
        fail('Give a message, as in hermes chat "Hello", or - to read it from standard input.', code=2)
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        if message is None:
            _converse(client, options, reasoning=reasoning)
        else:
            stream = client.stream(text_or_stdin(message), **options)
            _show(stream, as_json=as_json, stats=stats, reasoning=reasoning)


def generate(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="Text to go on from, as it is; - reads it from standard input.")
    ],
    *,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    as_json: opt.AsJson = False,
    stats: opt.Stats = False,
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Let the model go on from raw text, without a chat template."""
    options = opt.sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    options["text"] = text_or_stdin(text)
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        _show(client.stream(**options), as_json=as_json, stats=stats, reasoning=True)


def _show(stream: AnswerStream, *, as_json: bool, stats: bool, reasoning: bool) -> None:
    with stream:
        if as_json:
            for _ in stream:
                pass
            print_json(json_of(stream.answer))
            return
        answer = _print_pieces(stream, [], reasoning=reasoning)
        warn_about(answer.info)
        if stats:
            note(stats_of(answer))


def _print_pieces(stream: AnswerStream, pieces: list[str], *, reasoning: bool) -> Answer:
    """Prints the answer as it comes, its calls at the end; keeps the text in `pieces` for a caller that is interrupted.

    reasoning: is printed too.
    """
    thought = ""
    try:
        for delta in stream.deltas():
            if delta.index:
                continue
            if delta.reasoning and reasoning:
                thought = delta.reasoning
                think(thought)
            if delta.text:
                thought = _end_line(thought)
                pieces.append(delta.text)
                write(delta.text)
    finally:
        _end_line(thought)
        if pieces and not pieces[-1].endswith("\n"):
            write("\n")
    for call in stream.answer.tool_calls:
        write(f"{call.name} {call.arguments_json}\n")
    return stream.answer


def _end_line(thought: str) -> str:
    """Ends the line of reasoning that was printed last; what is left of it then."""
    if thought and not thought.endswith("\n"):
        think("\n")
    return ""


def _converse(client: Client, options: GenerateOptions, *, reasoning: bool) -> None:
    with suppress(ImportError):  # line editing and history, on machines that have them
        import readline  # noqa: F401, PLC0415
    note("Ctrl-D or /quit leaves, /reset begins anew, Ctrl-C stops an answer.")
    history: list[Message] = []
    while (said := _read(_PROMPT)) is not None:
        if said == _RESET:
            history.clear()
        elif said:
            history = _turn(client, history, [Message("user", said)], options, reasoning=reasoning)
            while history and history[-1].tool_calls:
                results = _results(history[-1])
                if results is None:
                    return
                history = _turn(client, history, results, options, reasoning=reasoning)


def _turn(
    client: Client, history: list[Message], said: list[Message], options: GenerateOptions, *, reasoning: bool
) -> list[Message]:
    """Answers what was said; returns the conversation with that and the answer, or as it was when that failed."""
    pieces: list[str] = []
    answered = Message("assistant")
    with client.stream([*history, *said], **options) as stream:
        try:
            answer = _print_pieces(stream, pieces, reasoning=reasoning)
        except KeyboardInterrupt:
            note("(stopped)")
        except HermesError as error:
            err.print(error.message, style="red", markup=False)
            return history
        else:
            warn_about(answer.info)
            note(stats_of(answer))
            answered = Message("assistant", tool_calls=answer.tool_calls, reasoning=answer.reasoning or None)
    return [*history, *said, replace(answered, content="".join(pieces))]


def _results(called: Message) -> list[Message] | None:
    """What the functions gave that a message calls, as whoever sits there says; None where they leave."""
    results = []
    for call in called.tool_calls:
        given = _read(f"{call.name}> ")
        if given is None:
            return None
        results.append(Message("tool", given, name=call.name, tool_call_id=call.id))
    return results


def _read(prompt: str) -> str | None:
    try:
        said = out.input(prompt, markup=False).strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return None
    return None if said in _LEAVE else said


def _is_terminal() -> bool:
    return sys.stdin.isatty()
