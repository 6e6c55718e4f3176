"""A model directory as Hermes and as transformers have it, and one conversation in the form of each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from assembler import messages, model_files
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.rendering import Renderer
from assembler.templates import render_options
from hermes.v1 import assembler_pb2, types_pb2
from tests.unit.assembler.model_styles import Style


@dataclass(frozen=True)
class Served:
    """A style as both sides have it."""

    style: Style
    files: ModelFiles
    renderer: Renderer
    reference: Any

    def ids_and_text(self, chat: assembler_pb2.Chat) -> tuple[list[int], str]:
        options = render_options(
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            continue_final_message=chat.continue_final_message,
            kwargs_json=chat.template_kwargs_json,
        )
        reading = self.renderer.render(messages.canonical(chat, "error"), options).reading
        if reading.live is None:
            return list(self.files.tokenizer.encode(reading.text)), reading.text
        return list(self.files.tokenizer.encode_guarded(reading.text, reading.live)), reading.text


def serve(style: Style, directory: Path) -> Served:
    """No mends, because transformers makes none."""
    files = model_files.load(directory)
    assert files.template is not None
    policy = OrderPolicy(merge_system=False, merge_same_role=False)
    renderer = Renderer(files.template, files.tokenizer, policy, "encode")
    return Served(style, files, renderer, AutoTokenizer.from_pretrained(directory))


def as_chat(told: dict[str, Any], **fields: Any) -> assembler_pb2.Chat:
    """messages and tools as transformers takes them, as the contract has them."""
    return assembler_pb2.Chat(
        messages=[
            types_pb2.Message(
                role=each["role"],
                content=each["content"],
                reasoning=each.get("reasoning"),
                name=each.get("name"),
                tool_call_id=each.get("tool_call_id"),
                tool_calls=[
                    types_pb2.ToolCall(
                        id=call["id"],
                        name=call["function"]["name"],
                        arguments_json=json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    )
                    for call in each.get("tool_calls", ())
                ],
            )
            for each in told["messages"]
        ],
        tools=[types_pb2.Tool(function_json=json.dumps(tool, ensure_ascii=False)) for tool in told["tools"]],
        **fields,
    )


def as_reference(served: Served, told: dict[str, Any], **fields: Any) -> tuple[list[int], str]:
    """The ids and the text that transformers makes of it."""
    told = json.loads(json.dumps(told))
    for each in told["messages"]:
        for call in each.get("tool_calls", ()):
            if served.style.arguments_are_text:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    tools = [{"type": "function", "function": tool} for tool in told["tools"]] or None
    fields = {"add_generation_prompt": True} | fields
    ids = served.reference.apply_chat_template(told["messages"], tools=tools, **fields)["input_ids"]
    return ids, served.reference.apply_chat_template(told["messages"], tools=tools, tokenize=False, **fields)
