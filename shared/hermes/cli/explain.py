"""`hermes explain`: a prompt piece by piece, and what each cache has of it now."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.text import Text

from hermes.cli import options as opt
from hermes.cli.console import Json, json_of_info, note, out, print_json, warn_about
from hermes.cli.pieces import LEGEND, Layout
from hermes.cli.prompts import given
from hermes.client import DEFAULT_ADDRESS, Client, Explanation, Segment

# Pieces that are shown of a prompt with more than twice as many, from either end.
_SHOWN_PIECES: Final = 60
_BAR_CELLS: Final = 32


def explain(
    message: opt.UserMessage = None,
    *,
    system: opt.System = None,
    conversation: opt.Conversation = None,
    tools: opt.Tools = None,
    raw: opt.Raw = False,
    namespace: opt.Namespace = None,
    max_prompt_tokens: opt.MaxPromptTokens = None,
    ids: Annotated[bool, typer.Option("--ids", help="Also show the token ids.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long texts and long prompts whole.")] = False,
    as_json: opt.AsJson = False,
    timeout: opt.Timeout = None,
    address: opt.Address = DEFAULT_ADDRESS,
    tls_ca: opt.TlsCa = None,
) -> None:
    """Show a prompt piece by piece: whose text each is, its tokens, and what both caches have of it now.

    Nothing is generated, and looking changes neither cache.
    """
    prompt = given(
        message,
        conversation=conversation,
        system=system,
        tools=tools,
        raw=raw,
        namespace=namespace,
        max_prompt_tokens=max_prompt_tokens,
    )
    with Client(address, timeout=timeout, tls_ca=tls_ca) as client:
        explanation = client.explain(prompt.messages, **prompt.options)
    if as_json:
        print_json(_json_of(explanation))
        return
    roles = [] if system is None else ["system"]
    roles += [str(each.get("role", "")) for each in prompt.messages or ()]
    layout = Layout(out.width, roles, ids=ids, full=full, tree_is_known=explanation.tree_cached_tokens is not None)
    _show(explanation, layout, full=full)
    warn_about(explanation.info)


def _json_of(explanation: Explanation) -> Json:
    return {
        "text": explanation.text,
        "segments": [asdict(each) for each in explanation.segments],
        "tree_cached_tokens": explanation.tree_cached_tokens,
        "rewrites": [asdict(each) for each in explanation.rewrites],
        "request_id": explanation.request_id,
        "assembly": json_of_info(explanation.info),
    }


def _show(explanation: Explanation, layout: Layout, *, full: bool) -> None:
    out.print(layout.head())
    place = 0
    for line in _pieces(explanation.segments, full=full):
        if isinstance(line, Segment):
            for row in layout.rows(line, place):
                out.print(row)
            place += len(line.token_ids)
        else:
            tokens = sum(len(each.token_ids) for each in line)
            out.print(Text(f"… {len(line)} pieces with {tokens} tokens; --full shows them …", style="dim"))
            place += tokens
    out.print(Text(LEGEND, style="dim"))
    out.print()
    tokens, info = place, explanation.info
    out.print(_bar("assembly cache", info.cached_tokens, tokens))
    out.print(_bar("prefix tree", explanation.tree_cached_tokens, tokens))
    dropped = f", {info.dropped_rounds} oldest rounds left out" if info.dropped_rounds else ""
    pieces = len(explanation.segments)
    note(f"{tokens} tokens in {pieces} {'piece' if pieces == 1 else 'pieces'}{dropped}")
    for rewrite in explanation.rewrites:
        note(f"{rewrite.message} {rewrite.remedy}")


def _pieces(segments: Sequence[Segment], *, full: bool) -> list[Segment | Sequence[Segment]]:
    """The segments to show, and in the place of others those."""
    if full or len(segments) <= 2 * _SHOWN_PIECES:
        return [*segments]
    return [*segments[:_SHOWN_PIECES], segments[_SHOWN_PIECES:-_SHOWN_PIECES], *segments[-_SHOWN_PIECES:]]


def _bar(name: str, cached: int | None, tokens: int) -> Text:
    """How far a cache reaches."""
    if cached is None:
        return Text(f"{name:14}  not known: no executor answered")
    filled = max(_BAR_CELLS * cached // tokens, min(cached, 1))
    return Text.assemble(
        f"{name:14}  ", ("█" * filled, "green"), ("░" * (_BAR_CELLS - filled), "dim"), f"  {cached} of {tokens} tokens"
    )
