"""Where messages are in a prompt."""

import pytest

from assembler import places
from assembler.messages import Message, Role

MARKED = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("question", ["u", "a", "s", "Why?", "你", "x" * 200, "im is one"])
def test_a_question_is_found_where_it_stands_and_not_in_the_words_of_a_mark(question: str) -> None:
    text = MARKED.format(question)
    system, user = places.of(text, (Message(Role.SYSTEM, "Be kind."), Message(Role.USER, question)))
    assert text[system.start : system.end] == "Be kind."
    assert (user.start, user.end) == (text.index("user\n") + 5, text.index("user\n") + 5 + len(question))


def test_white_space_that_a_template_leaves_out_is_told() -> None:
    (place,) = places.of(">Why?<", (Message(Role.USER, " \n Why? "),))
    assert place == (0, 1, 5, 3)


def test_a_text_inside_of_a_word_is_found_where_there_is_no_other() -> None:
    assert places.found("QWhy?A", "Why", 0) == 1
    assert places.found("nothing of it", "Why", 0) == -1


def test_a_text_that_many_places_begin_as_is_found_whole() -> None:
    content = "ab" * 64 + "c" + "ab" * 64
    assert places.found("ab" * 200 + " " + content, content, 0) == 401
