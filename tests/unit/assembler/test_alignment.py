"""Ids and text are aligned by what the ids are, whatever tokenizer made them of whatever text."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from assembler import model_files
from assembler.alignment import Alignment
from assembler.model_files import ModelFiles
from assembler.origins import TEMPLATE, Kind, Origin, Origins, Run
from assembler.segments import Segment, segments
from assembler.tokenizer import Tokenizer
from tests.unit.assembler.model_styles import CORPUS, STYLES

UNHURRIED = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
BY_NAME = {style.name: style for style in STYLES}
CALLER = Origin(Kind.CONTENT, 0)


def aligned(tokenizer: Tokenizer, ids: "array[int]", origins: Origins) -> list[tuple[list[int], str, bool]]:
    """The ids and the text of tokens that are told apart, and whether they are a control token."""
    alignment = Alignment(tokenizer)
    told = alignment.aligned(ids, origins)
    found: list[tuple[list[int], str, bool]] = []
    start, place = 0, 0
    for end, (character, goes_on) in enumerate(zip(told.ends, told.goes_on, strict=True), 1):
        if not goes_on:
            assert character >= place
            found.append(
                (list(ids[start:end]), origins.text[place:character], alignment.control(ids[start]) is not None)
            )
            start, place = end, character
    assert (start, place) == (len(ids), len(origins.text))
    return found


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files.load(BY_NAME["qwen3"].write(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files.load(BY_NAME["llama2"].write(tmp_path_factory.mktemp("llama2")))


@UNHURRIED
@given(data=st.data())
def test_whatever_ids_spell_a_text_each_has_its_characters(byte_level: ModelFiles, data: st.DataObject) -> None:
    tokenizer = byte_level.tokenizer
    parts = data.draw(st.lists(st.text(max_size=4) | st.sampled_from(["🎉", "é", "<|im_end|>", "capital"]), min_size=1))
    ids = array("I", (token_id for part in parts for token_id in tokenizer.encode(part)))
    text = "".join(parts)
    if not ids:
        return
    for held, shown, control in aligned(tokenizer, ids, Origins.untold(text)):
        assert b"".join(map(tokenizer.vocabulary.bytes_of, held)) == shown.encode()
        assert control == (held[0] in tokenizer.added.control.values())
        # No shorter beginning of the atom's tokens is whole characters.
        for end in range(1, len(held)):
            with pytest.raises(UnicodeDecodeError):
                b"".join(map(tokenizer.vocabulary.bytes_of, held[:end])).decode()


def test_the_space_before_each_text_is_no_character_of_it(pieces: ModelFiles) -> None:
    tokenizer = pieces.tokenizer
    text = "<s>[INST] a b</s>"
    found = aligned(tokenizer, tokenizer.encode(text), Origins.untold(text))
    assert found[0] == ([1], "<s>", True)
    assert found[-1] == ([2], "</s>", True)
    assert "".join(shown for _, shown, _ in found[1:-1]) == "[INST] a b"


def loaded(directory: Path, tokenizer: tokenizers.Tokenizer, *added: tokenizers.AddedToken) -> Tokenizer:
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    return model_files.load(directory).tokenizer


def trained(**parts: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def test_text_that_a_normalizer_changes_is_aligned_by_what_it_was(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, trained(normalizer=normalizers.NFC()), tokenizers.AddedToken("<x>", normalized=False))
    text = "e\u0301 a<x>o\u0308 b"
    found = aligned(tokenizer, tokenizer.encode(text), Origins.untold(text))
    assert found[0][1] == "e\u0301"
    assert "o\u0308" in [shown for _, shown, _ in found]
    assert ("<x>", True) in [(shown, control) for _, shown, control in found]


def test_tokens_of_one_letter_that_two_origins_share_are_not_parted(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, trained(normalizer=normalizers.NFC()))
    text = "e\u0301 a"
    origins = Origins(text, (Run(1, TEMPLATE), Run(len(text), CALLER)))
    ids = tokenizer.encode(text)
    assert list(segments(Alignment(tokenizer), ids, origins)) == [Segment(0, len(ids), text, CALLER, other_before=1)]


def test_white_space_that_a_control_token_takes_in_is_its_own(tmp_path: Path) -> None:
    tokenizer = loaded(
        tmp_path, trained(), tokenizers.AddedToken("<l>", lstrip=True), tokenizers.AddedToken("<r>", rstrip=True)
    )
    text = "a <l> b <r>\n\n c <r> "
    found = aligned(tokenizer, tokenizer.encode(text), Origins.untold(text))
    assert [shown for _, shown, control in found if control] == [" <l>", "<r>\n\n ", "<r> "]
    assert "".join(shown for _, shown, control in found if not control) == "a b c "


def test_a_control_token_in_a_callers_text_is_not_taken_for_a_live_one(pieces: ModelFiles) -> None:
    tokenizer = pieces.tokenizer
    text = "<s>a</s>b</s>"
    origins = Origins(text, (Run(3, TEMPLATE), Run(9, CALLER), Run(13, TEMPLATE)))
    guard = tokenizer.added.guard.tokens
    live = [each for each in guard.found(text) if each.start in (0, 9)]
    found = aligned(tokenizer, tokenizer.encode_guarded(text, live), origins)
    assert [shown for _, shown, control in found if control] == ["<s>", "</s>"]
    assert "".join(shown for _, shown, control in found if not control) == "a</s>b"


def test_what_cannot_be_aligned_is_one_piece_between_control_tokens(byte_level: ModelFiles) -> None:
    tokenizer = byte_level.tokenizer
    text = "<|im_start|>other words<|im_end|>"
    ids = tokenizer.encode("<|im_start|>not these<|im_end|>")
    found = aligned(tokenizer, ids, Origins.untold(text))
    assert [(shown, control) for _, shown, control in found] == [
        ("<|im_start|>", True), ("other words", False), ("<|im_end|>", True)
    ]  # fmt: skip
    assert [shown for _, shown, _ in aligned(tokenizer, ids[1:], Origins.untold("nothing alike"))] == ["nothing alike"]


def test_tokens_that_decode_by_their_neighbours_are_aligned(tmp_path: Path) -> None:
    words = {word: place for place, word in enumerate(["[UNK]", "cap", "##ital", "of", "france", "[X]"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    made = loaded(tmp_path, tokenizer, tokenizers.AddedToken("[X]", normalized=False))
    text = "Capital  of[X] FRANCE "
    found = aligned(made, made.encode(text), Origins.untold(text))
    assert [shown for _, shown, _ in found] == ["Cap", "ital  ", "of", "[X]", " FRANCE "]
