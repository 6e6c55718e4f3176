import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from assembler import digits, tokenizer, tokenizer_config
from assembler.model_files import ModelFiles
from assembler.tokenizer import Tokenizer
from tests.unit.assembler.model_styles import CORPUS

UNHURRIED = settings(deadline=None, max_examples=60)
NUMERALS = "0123456789²½٣Ⅷ①〇９𝟘\U0001fbf0"
TEXTS = st.text() | st.text(alphabet=NUMERALS + " \n'sa-<|m1>é中")
EVERYTHING = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
# From the third plane on there are Chinese characters, and hardly anything else.
ASSIGNED = [each for each in EVERYTHING if each < "\U00020100" or each >= "\U0010ff00"] + ["\U00040000", "\U000e0100"]


def digit_splitter() -> tokenizers.Tokenizer:
    """As Command-R's: NFC, every digit alone, GPT-2's pattern, and a token before and after raw text."""
    built = tokenizers.Tokenizer(models.BPE())
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        [*CORPUS, "1 m² and 12½"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    built.add_special_tokens(["<s>", "</s>", "<|m1|>", "1<|"])
    built.add_tokens([tokenizers.AddedToken("42nd", normalized=True), tokenizers.AddedToken("7", normalized=True)])
    ends = [(token, built.token_to_id(token)) for token in ("<s>", "</s>")]
    built.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ends)
    return built


@pytest.fixture(scope="module")
def built() -> tokenizers.Tokenizer:
    return digit_splitter()


@pytest.fixture(scope="module")
def own(built: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("digits")
    built.save(str(directory / "tokenizer.json"))
    return tokenizer.load(directory, tokenizer_config.load(directory).added)


def test_numerals_are_what_the_reference_takes_for_them() -> None:
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a".join(EVERYTHING[0x80:]))
    assert digits._numerals() == {piece for piece, _ in pieces if len(piece) == 1} - {"a"}
    assert all(digits._search().fullmatch(numeral) for numeral in digits._numerals())


@UNHURRIED
@given(text=TEXTS)
def test_pieces_are_the_text_and_cut_at_numerals_alone(text: str) -> None:
    pieces = list(digits.pieces(text))
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(piece) == 1 or digits._numerals().isdisjoint(piece)
    assert len(pieces) <= 1 + 2 * sum(letter in digits._numerals() for letter in text)


def test_every_character_gives_the_references_ids(files: ModelFiles, model_directory: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    for start in range(0, len(ASSIGNED), 4096):
        text = "\n".join(f"x{each}1 {each}{each}y  {each}." for each in ASSIGNED[start : start + 4096])
        (encoding,) = reference.encode_batch_fast([text], add_special_tokens=False)
        assert list(files.tokenizer.encode(text)) == encoding.ids


@UNHURRIED
@given(text=TEXTS | st.text(alphabet=NUMERALS + "a", max_size=9).map(lambda text: text * 600))
def test_ids_are_the_references_however_many_numerals_there_are(
    own: Tokenizer, built: tokenizers.Tokenizer, text: str
) -> None:
    assert own.encodes_with == "fastokens"
    assert list(own.encode(text)) == built.encode(text, add_special_tokens=False).ids
    assert list(own.encode_raw(text)) == built.encode(text).ids
    ids = built.encode(text).ids
    assert own.decode_shown(ids) == built.decode(ids)
    assert own.decode(ids) == built.decode(ids, skip_special_tokens=False)


def without_a_digit(definition: dict[str, Any]) -> None:
    del definition["model"]["vocab"]["5"]


def in_groups(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False


def with_a_space_in_front(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def without_a_pattern(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False


def with_one_step(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"] = definition["pre_tokenizer"]["pretokenizers"][0]


def compatible(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "NFKC"}


def with_a_numeral_token(definition: dict[str, Any]) -> None:
    definition["added_tokens"][-1]["content"] = "<½>"


@pytest.mark.parametrize(
    "change",
    [
        without_a_digit, in_groups, with_a_space_in_front, without_a_pattern, with_one_step, compatible,
        with_a_numeral_token,
    ],
)  # fmt: skip
def test_other_tokenizers_are_left_as_they_are(
    built: tokenizers.Tokenizer, change: Callable[[dict[str, Any]], None]
) -> None:
    definition = json.loads(built.to_str())
    assert digits.apart(definition) is not None
    change(definition)
    assert digits.apart(definition) is None
