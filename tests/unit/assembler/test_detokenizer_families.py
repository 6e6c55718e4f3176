"""Deltas of random tokens against the whole decode, for tokenizers as they are shipped and small ones of each kind."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from assembler import decoding, tokenizer
from assembler.detokenizer import StopRule, detokenizer
from assembler.sample import Sample
from assembler.tokenizer import Tokenizer
from assembler.vocabulary import Joining
from tests.unit.assembler.model_styles import CORPUS, STYLES
from tests.unit.assembler.test_real_tokenizers import PACKAGES, fetched

TEXTS = st.text("ab é你😀🇩🇪न\u0301\n.") | st.text()
PROMPTS = ("The capital of France is", "你好", "q\n", "a ")
UNHURRIED = settings(deadline=None, max_examples=60)


def metaspace(prepend: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def metaspace_bpe() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>", "</s>"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


MADE: dict[str, Callable[[], Any]] = {
    "metaspace": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "metaspace_bpe": metaspace_bpe,
}
STYLED = ("llama2", "mistral", "gemma", "qwen3")


@pytest.fixture(scope="module", params=[*MADE, *STYLED, *PACKAGES, "smollm2_135m"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Tokenizer:
    name, directory = request.param, tmp_path_factory.mktemp(request.param)
    if name in MADE:
        MADE[name]().save(str(directory / "tokenizer.json"))
    elif name in STYLED:
        next(style for style in STYLES if style.name == name).write(directory)
    else:
        directory = fetched(name) if name in PACKAGES else model_directory
    return tokenizer.load(directory, [])


def test_the_families_join_their_tokens_in_three_ways(own: Tokenizer, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["own"]
    pieces = ("llama2", "mistral", "gemma", "gemma3")
    expected = Joining.CONTEXT if name in MADE else Joining.BYTE_PIECES if name in pieces else Joining.BYTES
    assert own.vocabulary.joining is expected


def ids_for(own: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random tokens and random texts' tokens, in any order.

    Of pieces for single bytes only whole characters: of a broken run the library's decode keeps no character, and a
    stream has given the first ones already.
    """
    text = TEXTS.map(lambda drawn: list(own.encode(drawn)))
    token = st.integers(0, own.vocabulary.size - 1).filter(lambda token: not _is_part_of_a_character(own, token))
    return st.lists(text | st.lists(token, max_size=4), max_size=6).map(lambda parts: [*chain.from_iterable(parts)])


def _is_part_of_a_character(own: Tokenizer, token: int) -> bool:
    text = own.vocabulary.bytes_of(token)
    return own.vocabulary.joining is Joining.BYTE_PIECES and len(text) == 1 and not text.isascii()


def deltas(own: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    stream = detokenizer(own, prompt, ())
    return [*(stream.push(token) for token in ids), stream.flush()]


@UNHURRIED
@given(data=st.data())
def test_deltas_are_the_decode_of_prompt_and_answer_less_that_of_the_prompt(
    own: Tokenizer, data: st.DataObject
) -> None:
    prompt = list(own.encode(data.draw(st.sampled_from(PROMPTS))))
    ids = data.draw(ids_for(own))
    assert own.decode_shown(prompt) + "".join(deltas(own, prompt, ids)) == own.decode_shown([*prompt, *ids])


@UNHURRIED
@given(data=st.data())
def test_an_answer_completes_the_character_that_its_prompt_ends_inside(own: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text("aé你😀🇩न", min_size=1, max_size=8))
    ids = list(own.encode(text))
    cut = data.draw(st.integers(1, len(ids)))
    whole, prompt = own.decode_shown(ids), own.decode_shown(ids[:cut])
    if own.vocabulary.joining is not Joining.CONTEXT and "\ufffd" not in whole:
        spaces = len(b"".join(map(own.vocabulary.bytes_of, ids))) - len(whole.encode())  # at the beginning, not shown
        known = b"".join(map(own.vocabulary.bytes_of, ids[:cut]))[spaces:]
        prompt = known.decode(errors="ignore")
    elif not whole.startswith(prompt):
        assert "\ufffd" in prompt
        return
    assert prompt + "".join(deltas(own, ids[:cut], ids[cut:])) == whole


@UNHURRIED
@given(text=st.sampled_from(["é", "你", "😀", "Look: 🦩"]), data=st.data())
def test_a_prompt_that_stays_open_has_its_mark_and_the_answer_has_none(
    own: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = list(own.encode(text))
    prompt, answer = ids[: data.draw(st.integers(1, len(ids)))], list(own.encode("x" + data.draw(TEXTS)))
    assert own.decode_shown(prompt) + "".join(deltas(own, prompt, answer)) == own.decode_shown(prompt + answer)


@UNHURRIED
@given(data=st.data())
def test_control_tokens_at_the_end_of_a_prompt_hide_nothing_of_what_is_before_them(
    own: Tokenizer, data: st.DataObject
) -> None:
    control = sorted(own.vocabulary.special_ids)
    prompt = [*own.encode("The capital"), *data.draw(st.lists(st.sampled_from(control), min_size=6, max_size=30))]
    ids = list(own.encode("of France"))
    assert own.decode_shown(prompt) + "".join(deltas(own, prompt, ids)) == own.decode_shown(prompt + ids)


@UNHURRIED
@given(data=st.data(), part=st.integers(1, 9))
def test_ids_decoded_in_parts_give_what_the_library_gives_for_all(
    own: Tokenizer, data: st.DataObject, part: int
) -> None:
    text = TEXTS.map(lambda drawn: list(own.encode(drawn)))
    token = st.integers(0, own.vocabulary.size + 2)
    single = sorted(own.vocabulary.byte_pieces) or [0]
    runs = st.lists(st.sampled_from(single), max_size=12)
    ids = data.draw(st.lists(text | st.lists(token, max_size=6) | runs, max_size=8).map(lambda each: [*chain(*each)]))
    assert decoding.decode(ids, own.vocabulary, own.decode, part) == own.decode(ids)


def test_a_long_text_is_decoded_in_parts_of_no_more_than_the_library_may_hold(
    own: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(own.encode("The capital of 你好 is 😀. ")) * 3000
    whole, longest, library = own.decode(ids[:]), [0], own._encoder.decode

    def noting(some: list[int], **options: bool) -> str:
        longest[0] = max(longest[0], len(some))
        return library(some, **options)

    monkeypatch.setattr(own._encoder, "decode", noting, raising=True)
    assert own.decode(ids) == whole == library(ids, skip_special_tokens=False)
    if own.vocabulary.joining is not Joining.CONTEXT:
        assert longest[0] < decoding.PART + 50


@UNHURRIED
@given(text=TEXTS)
def test_no_delta_holds_half_a_character(own: Tokenizer, text: str) -> None:
    prompt, ids = list(own.encode(PROMPTS[0])), list(own.encode(text))
    whole = own.decode_shown([*prompt, *ids])
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in deltas(own, prompt, ids))


@UNHURRIED
@given(data=st.data())
def test_a_stop_string_anywhere_cuts_text_and_ids_where_it_is_completed(own: Tokenizer, data: st.DataObject) -> None:
    prompt = own.encode(PROMPTS[0])
    ids = data.draw(ids_for(own).filter(bool))
    pieces = deltas(own, list(prompt), ids)
    text = "".join(pieces)
    first = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[first : data.draw(st.integers(first, min(len(text), first + 12)))] or "never there \x00"
    for include in (False, True):
        sample = Sample(own, prompt, StopRule(stops=(stop,), include_stop=include))
        told = [sample.push([token]) for token in ids]
        given = "".join(piece.text for piece in told) + sample.finish().text
        at = text.find(stop)
        if at < 0:
            assert (given, sample.stop, sample.tokens) == (text, None, len(ids))
            continue
        end = at + len(stop)
        assert (given, sample.stop) == (text[: end if include else at], stop)
        come = ["".join(pieces[: place + 1]) for place in range(len(ids))]
        assert sample.tokens == next((place + 1 for place, each in enumerate(come) if stop in each), len(ids))
