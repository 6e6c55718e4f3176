"""Text of a wished length that nobody has seen before: sentences of everyday words, drawn by a seed."""

import random
from typing import Final

# Each is one token behind a space, for the tokenizers of Gemma 3, Llama 3.1, Qwen 3, DeepSeek V3 and SmolLM2 alike, so
# that a load has about as many tokens for one model as for another.
_WORDS: Final = tuple(
    """
    delivery order customer account address payment product store service support morning evening winter summer
    river garden kitchen window village market station bridge forest island mountain teacher doctor farmer student
    worker driver writer artist engine machine paper letter number picture story question answer problem reason
    result small large early late quick slow open closed simple modern clean heavy light warm cold green white black
    yellow carry bring send return change choose repair replace explain describe remember measure prepare leave
    between under above across before after during without within around because while although usually often
    sometimes never always
    """.split()  # noqa: SIM905 - a list of words reads as one
)
_SENTENCE: Final = (6, 14)  # words, shortest and longest

TOKENS_PER_WORD: Final = 1.10
"""What such text makes of a word: one token, and a full stop for every ten. A test counts with a real tokenizer."""


class Prose:
    """A source of text. The same names give the same text, others give one that agrees with it nowhere for long."""

    def __init__(self, *names: object) -> None:
        """names: what the text is for, a run's seed first."""
        self._random = random.Random("/".join(map(str, names)))  # noqa: S311 - a load is no secret

    def text(self, words: int) -> str:
        """Sentences of this many words together."""
        sentences = []
        while words > 0:
            length = min(words, self._random.randint(*_SENTENCE))
            sentences.append(" ".join(self._random.choices(_WORDS, k=length)).capitalize() + ".")
            words -= length
        return " ".join(sentences)

    def name(self, words: int = 2) -> str:
        """Words joined by underscores, as functions are named."""
        return "_".join(self._random.choices(_WORDS, k=words))
