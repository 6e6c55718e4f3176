"""What keeps the caches from hitting, as `hermes cache insight` shows it."""

from google.protobuf import json_format

from hermes.cli.console import Json, note, out
from hermes.v1 import assembler_pb2


def as_json(told: assembler_pb2.GetInsightResponse) -> Json:
    """The answer under the contract's names; times in seconds."""
    return {
        "namespaces": [
            {
                "namespace": each.namespace,
                "prompts": each.prompts,
                "causes": [
                    {
                        "code": cause.code,
                        "remedy": cause.remedy,
                        "prompts": cause.prompts,
                        "tokens": cause.tokens,
                        "idle": cause.idle.ToNanoseconds() / 1e9,
                    }
                    for cause in each.causes
                ],
            }
            for each in told.namespaces
        ],
        "rewrites": [json_format.MessageToDict(each) for each in told.rewrites],
    }


def show(told: assembler_pb2.GetInsightResponse) -> None:
    """Each namespace with the causes of its misses, the costliest first."""
    for rewrite in told.rewrites:
        out.print(f"{rewrite.message} {rewrite.remedy}", markup=False)
    if not told.namespaces:
        note("no prompts yet")
    for each in told.namespaces:
        name = f"namespace {each.namespace!r}" if each.namespace else "no namespace"
        found = "" if each.causes else ", nothing to tell"
        out.print(f"{name}: {_counted(each.prompts, 'recent prompt')}{found}", markup=False)
        for cause in each.causes:
            cost = f", {_counted(cause.tokens, 'token')} computed again" if cause.tokens else ""
            idle = f"last {cause.idle.ToNanoseconds() / 1e9:.0f} s ago"
            out.print(f"  {cause.code}: {_counted(cause.prompts, 'prompt')}{cost}, {idle}", markup=False)
            out.print(f"    {cause.remedy}", markup=False)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
