"""Tokenizers that split off every digit, as fastokens is quick at them.

Some (SmolLM's, StarCoder's, Command-R's) take out each digit before GPT-2's pattern splits what is between them.
fastokens has a scanner for that pattern, but takes 20 times as long where another step comes before it. So it gets the
pattern alone: the ten digits become added tokens, which it takes out by itself, and at the rarer numerals the text is
cut, as the step would have done. No id changes.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import pre_tokenizers

_DIGITS: Final = "0123456789"
# Characters from here on are letters of Chinese, Japanese and Korean, or no letters at all.
_NUMERALS_END: Final = 0x20000
# Ranges of rare numerals that are no farther apart count as one when a text is searched, which tests each for each
# character; what else is in such a range is found and passed over. Emoji are farther from any numeral.
_GAP: Final = 0x800
_RARE: Final = 0x10000
# Characters that are searched at a time, because one long search would keep every other thread from running.
_STRETCH: Final = 65_536


def apart(definition: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The tokenizer.json to give fastokens in place of a parsed one: it makes of the pieces what that makes of a text.

    None where that is not known to change no id.
    """
    model, normalizer = definition["model"], definition.get("normalizer")
    if not _splits_digits(definition.get("pre_tokenizer")) or model["type"] != "BPE":
        return None
    # NFC changes no numeral and joins none with what is beside it.
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    added = {token["content"] for token in definition["added_tokens"]}
    if not model["vocab"].keys() >= set(_DIGITS) or not all(map(_numerals().isdisjoint, added)):
        return None
    digits = [
        {
            "id": model["vocab"][digit],
            "content": digit,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": True,  # looked for when all others have been found
            "special": False,
        }
        for digit in _DIGITS
        if digit not in added
    ]
    return {
        **definition,
        "added_tokens": [*definition["added_tokens"], *digits],
        "pre_tokenizer": definition["pre_tokenizer"]["pretokenizers"][1],
    }


def pieces(text: str) -> Iterator[str]:
    """The text, cut before and after each numeral that is no ASCII digit."""
    if text.isascii():
        yield text
        return
    end = 0
    for start in range(0, len(text), _STRETCH):
        for found in _search().finditer(text, start, start + _STRETCH):
            if found[0] in _numerals():
                yield text[end : found.start()]
                yield found[0]
                end = found.end()
    yield text[end:]


def _splits_digits(step: Mapping[str, Any] | None) -> bool:
    match step:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, **pattern},
            ],
        }:
            return bool(pattern.get("use_regex", True))
    return False


@functools.cache
def _numerals() -> frozenset[str]:
    """The numerals but ASCII digits, as the step itself knows them: libraries differ in how new their Unicode is."""
    known = (chr(code) for code in range(0x80, _NUMERALS_END))
    likely = [each for each in known if unicodedata.category(each) in ("Nd", "Nl", "No", "Cn")]
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a".join(likely))
    return frozenset(piece for piece, _ in pieces if len(piece) == 1 and piece != "a")


@functools.cache
def _search() -> re.Pattern[str]:
    """Finds numerals, and some other characters."""
    codes = sorted(map(ord, _numerals()))
    common = "".join(chr(code) for code in codes if code < _RARE)
    ranges: list[tuple[int, int]] = []
    for code in (code for code in codes if code >= _RARE):
        if ranges and code - ranges[-1][1] <= _GAP:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    rare = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
    return re.compile(f"[{common}{rare}]")
