"""Tokens that only the tokenizer itself can join, with pieces for single bytes among them."""

from collections.abc import Iterable, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from assembler import tokenizer
from assembler.detokenizer import detokenizer
from assembler.tokenizer import Tokenizer
from assembler.vocabulary import Joining

WORDS = ["▁hello", "▁world", "hello", "▁", "é", "!", "\ufffd"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "</s>", *WORDS, *BYTES]
ID_OF = {piece: at for at, piece in enumerate(PIECES)}
WHOLE = ["▁hello", "▁world", "hello", "é", "!", "你", "🦩"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(ID_OF, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made.add_special_tokens(["<unk>", "</s>"])
    directory = tmp_path_factory.mktemp("window")
    made.save(str(directory / "tokenizer.json"))
    loaded = tokenizer.load(directory, [])
    assert loaded.vocabulary.joining is Joining.CONTEXT
    return loaded


def ids_of(*pieces: str) -> list[int]:
    """Ids of pieces; a character that is none has one for each of its bytes."""
    return [at for piece in pieces for at in ([ID_OF[piece]] if piece in ID_OF else map(_of_byte, piece.encode()))]


def _of_byte(byte: int) -> int:
    return ID_OF[BYTES[byte]]


def deltas(own: Tokenizer, prompt: Sequence[int], ids: Iterable[int]) -> list[str]:
    stream = detokenizer(own, prompt, ())
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize(
    "run",
    [["</s>"], ["<unk>"], ["\ufffd"], ["<0xF0>"], ["\ufffd", "<0x9F>"], ["hello"], ["🦩"]],
    ids=["control", "unknown", "mark", "broken", "both", "word", "character"],
)
def test_every_token_of_a_run_of_any_length_is_joined_with_as_few_others(
    own: Tokenizer, run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, decode_shown = [0], own.decode_shown

    def noting(ids: Sequence[int]) -> str:
        joined[0] += len(ids)
        return decode_shown(ids)

    monkeypatch.setattr(own, "decode_shown", noting)
    counts = []
    for length in (100, 1000):
        joined[0] = 0
        ids = ids_of(*run * length, "▁world")
        text = "".join(deltas(own, ids_of("▁hello"), ids))
        assert text.endswith(" world")
        counts.append(joined[0] / len(ids))
    assert counts[1] <= counts[0] * 1.1


def test_ids_that_the_tokenizer_lacks_are_no_run_either(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, decode_shown = set(), own.decode_shown

    def noting(ids: Sequence[int]) -> str:
        lengths.add(len(ids))
        return decode_shown(ids)

    monkeypatch.setattr(own, "decode_shown", noting)
    ids = [len(PIECES) + 3] * 500 + ids_of("▁world")
    assert "".join(deltas(own, ids_of("hello"), ids)) == " world"
    assert max(lengths) < 30


@pytest.mark.parametrize("mark", ["\ufffd", "<0xF0>"])
def test_a_long_run_of_marks_comes_as_it_goes_and_nothing_of_it_is_lost(own: Tokenizer, mark: str) -> None:
    ids = ids_of(*[mark] * 50, "!")
    pieces = deltas(own, ids_of("hello"), ids)
    assert "".join(pieces) == "\ufffd" * 50 + "!"
    assert "".join(pieces[:25]).count("\ufffd") > 20


@settings(deadline=None)
@given(words=st.lists(st.sampled_from([*WHOLE, "</s>"]), max_size=12), data=st.data())
def test_control_tokens_between_them_do_not_change_how_tokens_are_joined(
    own: Tokenizer, words: list[str], data: st.DataObject
) -> None:
    prompt = ids_of("hello", *["</s>"] * data.draw(st.integers(0, 12)))
    ids = ids_of(*words)
    assert own.decode_shown(prompt) + "".join(deltas(own, prompt, ids)) == own.decode_shown([*prompt, *ids])


@settings(deadline=None)
@given(
    before=st.lists(st.sampled_from(["▁hello", "!", "é", "</s>"]), max_size=8),
    letter=st.sampled_from(["ß", "你", "🦩"]),
    data=st.data(),
)
def test_an_answer_completes_the_character_that_its_prompt_ends_inside(
    own: Tokenizer, before: list[str], letter: str, data: st.DataObject
) -> None:
    start, character = ids_of("hello", *before), ids_of(letter)
    cut = data.draw(st.integers(1, len(character) - 1))
    answer = [*character[cut:], *ids_of("▁world")]
    assert "".join(deltas(own, start + character[:cut], answer)) == f"{letter} world"
    assert "".join(deltas(own, start + character[:cut], ids_of("▁world"))) == " world"
