"""Prompts that an assembler is asked for, and what it tells of them, for tests."""

from assembler.findings import DYNAMIC_PREFIX, Finding
from assembler.orders import Assembled, Order
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from hermes.v1 import assembler_pb2, types_pb2


def chat(*turns: tuple[str, str], **fields: object) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role=role, content=content) for role, content in turns]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages, **fields))


async def assembled(assembler: Assembler, use: CacheUse, *turns: tuple[str, str]) -> Assembled:
    return await assembler.assemble(Order(chat(*turns), None, cache=use))


async def dynamic(assembler: Assembler, use: CacheUse, *turns: tuple[str, str]) -> list[Finding]:
    found = (await assembled(assembler, use, *turns)).findings
    return [finding for finding in found if finding.code == DYNAMIC_PREFIX]
