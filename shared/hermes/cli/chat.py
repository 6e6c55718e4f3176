"""`hermes chat` and `hermes generate`: one answer as it comes, or a conversation."""

import sys
from contextlib import suppress
from typing import Annotated

import typer

from hermes.cli import options as opt
from hermes.cli.console import err, fail, json_of, note, out, print_json, stats_of, text_or_stdin, warn_about
from hermes.client import DEFAULT_ADDRESS, Answer, AnswerStream, Client, GenerateOptions, Message
from shared.errors import HermesError

_PROMPT = "you> "
_LEAVE = {"/quit", "/exit", "/q"}
_RESET = "/reset"


def chat(
    message: Annotated[
        str | None,
        typer.Argument(help="What to say; - reads it from standard input. Left out on a terminal: a conversation."),
    ] = None,
    *,
    system: opt.System = None,
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
    options["max_prompt_tokens"] = max_prompt_tokens
    if message is None and not _is_terminal():
        fail('Give a message, as in hermes chat "Hello", or - to read it from standard input.', code=2)
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        if message is None:
            _converse(client, options)
        else:
            _show(client.stream(text_or_stdin(message), **options), as_json=as_json, stats=stats)


def generate(
    text: Annotated[str, typer.Argument(help="Text to go on from, as it is; - reads it from standard input.")],
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
        _show(client.stream(**options), as_json=as_json, stats=stats)


def _show(stream: AnswerStream, *, as_json: bool, stats: bool) -> None:
    with stream:
        if as_json:
            for _ in stream:
                pass
            print_json(json_of(stream.answer))
            return
        answer = _print_pieces(stream, [])
        warn_about(answer.info)
        if stats:
            note(stats_of(answer))


def _print_pieces(stream: AnswerStream, pieces: list[str]) -> Answer:
    """Prints the text as it comes, and keeps it in `pieces` for a caller that is interrupted."""
    try:
        for piece in stream:
            pieces.append(piece)
            out.file.write(piece)
            out.file.flush()
    finally:
        if pieces and not pieces[-1].endswith("\n"):
            out.file.write("\n")
            out.file.flush()
    return stream.answer


def _converse(client: Client, options: GenerateOptions) -> None:
    with suppress(ImportError):  # line editing and history, on machines that have them
        import readline  # noqa: F401, PLC0415
    note("Ctrl-D or /quit leaves, /reset begins anew, Ctrl-C stops an answer.")
    history: list[Message] = []
    while (said := _read()) is not None:
        if said == _RESET:
            history.clear()
        elif said:
            history.append(Message("user", said))
            history = _turn(client, history, options)


def _turn(client: Client, history: list[Message], options: GenerateOptions) -> list[Message]:
    """Answers the last message; returns the conversation with the answer, or without that message when it failed."""
    pieces: list[str] = []
    with client.stream(history, **options) as stream:
        try:
            answer = _print_pieces(stream, pieces)
        except KeyboardInterrupt:
            note("(stopped)")
        except HermesError as error:
            err.print(error.message, style="red", markup=False)
            return history[:-1]
        else:
            warn_about(answer.info)
            note(stats_of(answer))
    return [*history, Message("assistant", "".join(pieces))]


def _read() -> str | None:
    try:
        said = out.input(_PROMPT, markup=False).strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return None
    return None if said in _LEAVE else said


def _is_terminal() -> bool:
    return sys.stdin.isatty()
