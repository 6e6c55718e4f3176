"""What a template makes of a conversation, without a server: a chat as JSON on standard input, the prompt on output.

    python -m assembler.preview --template chatml.jinja [--model DIRECTORY OR NAME]

The chat is `hermes.v1.Chat` as protobuf has it in JSON. Used by `hermes assemble --template`.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from google.protobuf import json_format

from assembler import messages, model_files, template_files, templates
from assembler.orders import Order
from assembler.pipeline import Assembler
from hermes.v1 import assembler_pb2
from shared import models
from shared.errors import HermesError, StartupError

# Shown where there is no tokenizer that has such tokens.
_NAMED: Final = MappingProxyType({"bos_token": "<bos_token>", "eos_token": "<eos_token>"})


class Preview(NamedTuple):
    """token_ids: None where no model's tokenizer was named."""

    text: str
    token_ids: list[int] | None
    template_version: str
    warnings: list[str]


def preview(chat: assembler_pb2.Chat, template: str, model: Path | None) -> Preview:
    """model: directory whose tokenizer encodes the prompt. Raises HermesError or StartupError."""
    if model is None:
        chosen = template_files.read(template, _NAMED)
        conversation = messages.canonical(chat, "error")
        options = templates.options_of(chat)
        chosen.check(conversation, options.kwargs)
        return Preview(chosen.render(conversation, options), None, chosen.version, [])
    assembler = Assembler(model_files.load(model, template))
    order = Order(assembler_pb2.Prompt(chat=chat), None, return_text=True)
    assembled = asyncio.run(assembler.assemble(order))
    assembler.close()
    warnings = [f"{finding.message} {finding.remedy}".rstrip() for finding in assembled.findings]
    return Preview(assembled.text or "", list(assembled.ids), assembled.template_version, warnings)


def main(argv: list[str] | None = None) -> int:
    """Prints the preview as one JSON object. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m assembler.preview")
    parser.add_argument("--template", required=True)
    parser.add_argument("--model")
    arguments = parser.parse_args(argv)
    try:
        chat = json_format.Parse(sys.stdin.buffer.read().decode(), assembler_pb2.Chat())
        directory = None if arguments.model is None else models.resolve(arguments.model).path
        shown = preview(chat, arguments.template, directory)
    except (HermesError, StartupError, json_format.ParseError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(shown._asdict(), ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
