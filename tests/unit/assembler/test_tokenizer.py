import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from assembler import encoders, tokenizer, tokenizer_config
from assembler.model_files import ModelFiles
from assembler.tokenizer import Tokenizer
from assembler.tokenizer_config import AddedToken
from assembler.vocabulary import Joining
from shared.errors import StartupError


def loaded(directory: Path) -> Tokenizer:
    return tokenizer.load(directory, tokenizer_config.load(directory).added)


def write_word_piece(directory: Path) -> None:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", ",", "é"]
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece({piece: at for at, piece in enumerate(pieces)}))
    built.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    built.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    built.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)]
    )
    built.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    built.enable_truncation(2)
    built.enable_padding(length=50)
    built.save(str(directory / "tokenizer.json"))


def test_fastokens_serves_the_default_model(files: ModelFiles) -> None:
    assert files.tokenizer.encodes_with == "fastokens"
    assert files.tokenizer.vocabulary.joining is Joining.BYTES


@settings(deadline=None)
@given(text=st.text() | st.text(alphabet="<|im_start|>\n é😀a"))
def test_ids_are_the_references_and_no_special_token_is_added(files: ModelFiles, reference: Any, text: str) -> None:
    assert list(files.tokenizer.encode(text)) == reference(text, add_special_tokens=False)["input_ids"]
    assert list(files.tokenizer.encode_raw(text)) == reference(text)["input_ids"]


def test_control_tokens_in_rendered_text_are_single_ids(files: ModelFiles, reference: Any) -> None:
    ids = files.tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (reference.bos_token_id, reference.eos_token_id)
    assert files.tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert files.tokenizer.decode_shown(ids) == "user\nhi"


@given(text=st.text(max_size=50).map(lambda text: text * 7))
@settings(deadline=None)
def test_the_bound_on_tokens_never_exceeds_what_encoding_gives(files: ModelFiles, text: str) -> None:
    assert files.tokenizer.least_tokens(text) <= len(files.tokenizer.encode(text))


def test_the_bound_on_tokens_grows_with_the_text_but_not_with_characters_that_leave_no_token(files: ModelFiles) -> None:
    assert files.tokenizer.least_tokens("a" * 100_000) > 1_000
    assert len(files.tokenizer.encode("\x04" * 1000)) == files.tokenizer.least_tokens("\x04" * 1000) == 0


def test_the_bound_is_not_worked_out_where_it_cannot_be_above_what_is_asked(files: ModelFiles) -> None:
    text = "a" * 100_000
    least = files.tokenizer.least_tokens(text)
    assert files.tokenizer.least_tokens(text, above=least - 1) == least
    assert files.tokenizer.least_tokens(text, above=least) == 0


def test_raw_text_gets_the_special_tokens_of_the_tokenizers_own_rule(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    own = loaded(tmp_path)
    assert list(own.encode("hello worlds")) == [3, 4, 5]
    assert list(own.encode_raw("hello worlds")) == [1, 3, 4, 5, 2]


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    assert len(loaded(tmp_path).encode("hello " * 30)) == 30


def test_nothing_bounds_the_tokens_where_any_word_can_be_unknown(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    own = loaded(tmp_path)
    assert own.vocabulary.joining is Joining.CONTEXT
    assert own.least_tokens("a" * 1000) == 0


def test_tokens_that_only_the_config_declares_are_found_in_text(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    config = {
        "eos_token": "<end>",
        "image_token": "<image>",
        "additional_special_tokens": ["<extra>", {"content": "world", "lstrip": False}],
        "added_tokens_decoder": {"8": {"content": "<plain>", "special": False, "normalized": False}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = loaded(tmp_path)
    ids = list(own.encode("hello<end>world<plain><extra><image>"))
    assert ids[:4] == [3, own.encode("<end>")[0], 4, 8]
    assert len(set(ids)) == len(ids) == 6
    assert own.decode_shown(ids) == "hello <plain>"


def test_flags_that_the_config_declares_win_over_those_of_tokenizer_json(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    config = {
        "added_tokens_decoder": {"3": {"content": "hello", "special": True, "lstrip": True, "rstrip": True}},
        "eos_token": "world",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition["added_tokens"] = [{"id": 3, "content": "hello"} | plain, {"id": 4, "content": "world"} | plain]
    definition["added_tokens"][1]["lstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    own = loaded(tmp_path)
    for text in ("a  hello  b", "a  world  b"):
        assert list(own.encode(text)) == reference.encode(text, add_special_tokens=False)


def test_the_reference_serves_where_fastokens_cannot_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_word_piece(tmp_path)

    def refuse(self: object, *rest: object) -> None:
        raise ValueError("this kind is unknown")

    monkeypatch.setattr(encoders.Fast, "__init__", refuse)
    with caplog.at_level(logging.WARNING):
        own = loaded(tmp_path)
    assert own.encodes_with == "tokenizers"
    assert "this kind is unknown" in caplog.text
    assert list(own.encode("hello")) == [3]


def test_the_reference_serves_where_fastokens_differs(
    model_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = encoders.Fast.encode

    def wrong(self: Any, text: str, *, add_special_tokens: bool) -> Any:
        return right(self, text.replace("é", "e"), add_special_tokens=add_special_tokens)

    monkeypatch.setattr(encoders.Fast, "encode", wrong)
    with caplog.at_level(logging.WARNING):
        assert loaded(model_directory).encodes_with == "tokenizers"
    assert "differs" in caplog.text


def test_texts_with_bytes_that_are_no_tokens_are_encoded_as_the_reference_does(tmp_path: Path) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.train_from_iterator(["!! !! !!", "is it so? so it is!"], trainer)
    built.add_special_tokens(["<s>", "<s>>"])
    definition = json.loads(built.to_str())
    vocab = definition["model"]["vocab"]
    vocab["unused"] = vocab.pop("Ą")  # how the byte 4 is written
    definition["post_processor"] = json.loads(
        tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", built.token_to_id("<s>"))]).__getstate__()
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    own, reference = loaded(tmp_path), tokenizers.Tokenizer.from_str(json.dumps(definition))
    assert own.encodes_with == "fastokens"
    for text in ("a\x04b", "!\x04!", "<s>\x04<s>>so", "\x04", "is it so?"):
        assert list(own.encode(text)) == reference.encode(text, add_special_tokens=False).ids
        assert list(own.encode_raw(text)) == reference.encode(text).ids


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "{}",
        "[]",
        "5",
        '{"model": 5}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": 5}, "added_tokens": []}',
    ],
)
def test_a_tokenizer_that_cannot_be_read_stops_the_start_with_a_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        tokenizer.load(tmp_path, [AddedToken("x")])
