"""`hermes assemble`: the prompt as the model reads it."""

import json
import subprocess
import sys
from typing import Annotated, Any, Final

import typer
from google.protobuf import json_format

from hermes.cli import options as opt
from hermes.cli.console import err, fail, json_of_info, note, out, print_json, warn_about
from hermes.cli.prompts import Given, given
from hermes.client import DEFAULT_ADDRESS, Client
from hermes.messages import chat_messages, chat_tools
from hermes.v1 import assembler_pb2

# Of a prompt that is shown in short, from either end.
_SHOWN_CHARACTERS: Final = 200


def assemble(
    message: opt.UserMessage = None,
    *,
    system: opt.System = None,
    conversation: opt.Conversation = None,
    tools: opt.Tools = None,
    raw: opt.Raw = False,
    namespace: opt.Namespace = None,
    max_prompt_tokens: opt.MaxPromptTokens = None,
    head_tail: Annotated[
        bool, typer.Option("--head-tail", help="Show only the first and the last characters of a long prompt.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="FILE",
            help="Render here, without a server, with a .jinja or .toml template or a built-in one's name.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="With --template: the model whose tokenizer gives the ids."),
    ] = None,
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Show the token ids and the text that a message becomes."""
    if template is not None and raw:
        raise typer.BadParameter("Raw text has no template: leave out --raw or --template.")
    prompt = given(
        message,
        conversation=conversation,
        system=system,
        tools=tools,
        raw=raw,
        namespace=namespace,
        max_prompt_tokens=max_prompt_tokens,
    )
    if template is not None:
        if namespace is not None or max_prompt_tokens is not None:
            raise typer.BadParameter("--namespace and --max-prompt-tokens are a server's; leave out --template.")
        _render_here(prompt, template, model, head_tail=head_tail, as_json=as_json)
        return
    if model is not None:
        raise typer.BadParameter("--model goes with --template; a server has its own model.")
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        result = client.assemble(prompt.messages, **prompt.options)
    if as_json:
        print_json({"token_ids": result.token_ids, "text": result.text, "assembly": json_of_info(result.info)})
        return
    out.print(" ".join(map(str, result.token_ids)))
    out.print(_shown(result.text or "", head_tail=head_tail), markup=False)
    note(f"{len(result.token_ids)} tokens, {result.info.cached_tokens} from the assembly cache")
    warn_about(result.info)


def _render_here(prompt: Given, template: str, model: str | None, *, head_tail: bool, as_json: bool) -> None:
    """In a process of the assembler's, because a caller's package stands on no service."""
    chat = assembler_pb2.Chat(
        messages=chat_messages(prompt.messages or (), prompt.options.get("system")),
        tools=chat_tools(prompt.options.get("tools", ())),
    )
    command = [sys.executable, "-m", "assembler.preview", "--template", template]
    if model is not None:
        command += ["--model", model]
    ended = subprocess.run(  # noqa: S603 - our own program; what the user wrote is an argument and no command
        command, input=json_format.MessageToJson(chat).encode(), capture_output=True, check=False
    )
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        if said and "No module named" in said[-1]:
            fail("To render without a server the assembler is needed: pip install 'hermes-serving[assembler]'.")
        fail(said[-1] if said else "The template could not be rendered.")
    shown: dict[str, Any] = json.loads(ended.stdout)
    if as_json:
        print_json(shown)
        return
    if shown["token_ids"] is not None:
        out.print(" ".join(map(str, shown["token_ids"])))
    out.print(_shown(shown["text"], head_tail=head_tail), markup=False)
    counted = f"{len(shown['text'])} characters"
    note(counted if shown["token_ids"] is None else f"{len(shown['token_ids'])} tokens, {counted}")
    for warning in shown["warnings"]:
        err.print(f"warning: {warning}", style="yellow", markup=False)


def _shown(text: str, *, head_tail: bool) -> str:
    if not head_tail or len(text) <= 2 * _SHOWN_CHARACTERS:
        return text
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    return f"{text[:_SHOWN_CHARACTERS]}\n… {left_out} characters …\n{text[-_SHOWN_CHARACTERS:]}"
