"""Anybody's text as a terminal may have it: shown, and not obeyed."""

import re
import unicodedata
from typing import Final

# Pictures of the control characters of ASCII.
_PICTURES: Final = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "\u2421"}
# Whatever else is no letter: further controls, marks that turn the direction of writing, line separators, halves of
# surrogate pairs, private letters that a font may draw as anything.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7e]")


def visible(text: str) -> str:
    """The text with a picture or an escape for each character that is none to look at; also for line ends."""
    return _BEYOND_ASCII.sub(_escape, text.translate(_PICTURES))


def escaped(json_text: str) -> str:
    """JSON with escapes for such characters in its strings."""
    return _BEYOND_ASCII.sub(_escape, json_text)


def _escape(match: re.Match[str]) -> str:
    letter = match[0]
    if unicodedata.category(letter) not in _UNSEEN:
        return letter
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))
