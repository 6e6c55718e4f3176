"""`hermes assemble`: the prompt as the model reads it."""

from typing import Annotated

import typer

from hermes.cli import options as opt
from hermes.cli.console import fail, json_of_info, note, out, print_json, text_or_stdin, warn_about
from hermes.client import DEFAULT_ADDRESS, Client


def assemble(
    message: Annotated[str, typer.Argument(help="A user message; - reads it from standard input.")],
    *,
    system: opt.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the message as raw text, without a chat template.")] = False,
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Show the token ids and the text that a message becomes."""
    if raw and system is not None:
        fail("--raw takes the text as it is, so there is no place for --system.", code=2)
    text = text_or_stdin(message)
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        result = client.assemble(text=text) if raw else client.assemble(text, system=system)
    if as_json:
        print_json({"token_ids": result.token_ids, "text": result.text, "assembly": json_of_info(result.info)})
        return
    out.print(" ".join(map(str, result.token_ids)))
    out.print(result.text or "", markup=False)
    note(f"{len(result.token_ids)} tokens, {result.info.cached_tokens} from the assembly cache")
    warn_about(result.info)
