"""How a piece of a prompt is laid out on a terminal: rows of what is cached, where it stands, whose it is, its text."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Final

from rich.cells import cell_len, chop_cells
from rich.text import Text

from hermes.cli.visible import visible
from hermes.client import Segment

LEGEND: Final = "A assembly cache, T prefix tree: █ has all of it, ▌ a part, · nothing, ? unknown"

# Columns: A, T, the place of the first token, how many there are, whose the text is; the text has the rest.
_PLACE_CELLS: Final = 7
_COUNT_CELLS: Final = 6
_WHOSE_CELLS: Final = 14
_BEFORE_WHOSE: Final = 4 + _PLACE_CELLS + 1 + _COUNT_CELLS + 2
_BEFORE_TEXT: Final = _BEFORE_WHOSE + _WHOSE_CELLS
_LEAST_TEXT_CELLS: Final = 20
# Of a long text, from its beginning and from its end; so of its ids.
_HEAD_CHARACTERS: Final = 200
_TAIL_CHARACTERS: Final = 80
_HEAD_IDS: Final = 20
_TAIL_IDS: Final = 8

# A message's colour is that of its place, so that neighbours differ.
_COLOURS: Final = ("cyan", "green", "yellow", "blue")
_STYLES: Final = {"template": "dim", "tools": "magenta", "variable": "magenta", "raw": "cyan"}
# Of text in a piece's tokens that is not its own, and of line ends.
_OTHER: Final = "dim"
_LEFT_OUT: Final = "dim italic"
_CONTROL: Final = "bold red"
_KINDS: Final = {"reasoning": "reasoning", "tool_call": "call", "name": "name"}


@dataclass(frozen=True, slots=True)
class Layout:
    """width: cells of a line. roles: of the messages, by their indices. tree_is_known: the executor told what it has.

    ids: of the tokens, are shown as well. full: nothing is shortened.
    """

    width: int
    roles: Sequence[str]
    ids: bool
    full: bool
    tree_is_known: bool

    def head(self) -> Text:
        """The names of the columns."""
        columns = f"A T {'at':>{_PLACE_CELLS}} {'tokens':>{_COUNT_CELLS}}  {'whose':{_WHOSE_CELLS}}text"
        return Text(columns, style="bold")

    def rows(self, segment: Segment, place: int) -> Iterator[Text]:
        """place: of its first token in the prompt."""
        cells = max(_LEAST_TEXT_CELLS, self.width - _BEFORE_TEXT)
        tokens, style = len(segment.token_ids), _style(segment)
        lines = self._text_lines(segment, style, cells)
        if self.ids:
            lines += [Text(line, style="dim") for line in textwrap.wrap(self._ids(segment), cells)]
        tree = _mark(segment.tree_cached_tokens, tokens) if self.tree_is_known else "?"
        first = f"{_mark(segment.cached_tokens, tokens)} {tree} {place:>{_PLACE_CELLS}} {tokens:>{_COUNT_CELLS}}  "
        whose = chop_cells(visible(self._whose(segment)), _WHOSE_CELLS - 1)[0]
        for start, name, line in zip_longest([first], [whose], lines, fillvalue=""):
            padding = " " * (_WHOSE_CELLS - cell_len(name))
            yield Text.assemble(f"{start:{_BEFORE_WHOSE}}", (name, style), padding, line)

    def _text_lines(self, segment: Segment, style: str, cells: int) -> list[Text]:
        """The text, a line for each of its lines, and more where one is longer than there are cells."""
        end = len(segment.text) - segment.other_after
        own = segment.text[segment.other_before : end]
        head, left_out, tail = (own, "", "") if self.full else _shortened(own)
        shown = Text()
        for part, its_style in (
            (segment.text[: segment.other_before], _OTHER),
            (head, style),
            (left_out, _LEFT_OUT),
            (tail, style),
            (segment.text[end:], _OTHER),
        ):
            line_end = "\n" if its_style is _LEFT_OUT else "⏎\n"
            first, *others = part.split("\n")
            shown.append(visible(first), its_style)
            for line in others:
                shown.append(line_end, _OTHER).append(visible(line), its_style)
        lines: list[Text] = []
        for row in shown.split("\n"):
            chopped = chop_cells(row.plain, cells)
            lines += row.divide(list(accumulate(map(len, chopped[:-1]))))
        return lines

    def _ids(self, segment: Segment) -> str:
        ids = [*map(str, segment.token_ids)]
        if not self.full and len(ids) > _HEAD_IDS + _TAIL_IDS + 1:
            ids[_HEAD_IDS:-_TAIL_IDS] = [f"…{len(ids) - _HEAD_IDS - _TAIL_IDS}…"]
        return " ".join(ids)

    def _whose(self, segment: Segment) -> str:
        index, kind = segment.message_index, segment.kind
        if segment.control:
            return "control" if index is None else f"{index} control"
        if index is None:
            return "text" if kind == "raw" else kind
        role = self.roles[index] if index < len(self.roles) else "message"
        return f"{index} {_KINDS.get(kind, role)}"


def _style(segment: Segment) -> str:
    if segment.control:
        return _CONTROL
    if segment.message_index is None:
        return _STYLES[segment.kind]
    return _COLOURS[segment.message_index % len(_COLOURS)]


def _mark(cached: int, tokens: int) -> str:
    return "·" if not cached else "█" if cached == tokens else "▌"


def _shortened(text: str) -> tuple[str, str, str]:
    """A text's beginning, how much of it is left out, and its end."""
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    if left_out <= _TAIL_CHARACTERS:  # the words for it take as much room
        return text, "", ""
    return text[:_HEAD_CHARACTERS], f"\n… {left_out} characters …\n", text[-_TAIL_CHARACTERS:]
