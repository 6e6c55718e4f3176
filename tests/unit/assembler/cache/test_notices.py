from pathlib import Path

import pytest

from assembler.cache.key import tag_of
from assembler.cache.notices import Notices

A, B = tag_of("a"), tag_of("b")


def test_each_process_hears_once_what_was_flushed_since_it_began(tmp_path: Path) -> None:
    one = Notices(tmp_path / "flushed")
    one.post(A)
    two = Notices(tmp_path / "flushed")
    assert (one.news(), two.news()) == ([A], [])
    two.post(B)
    two.post(None)
    assert (one.news(), two.news()) == ([B, None], [B, None])
    assert (one.news(), two.news()) == ([], [])


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    notices = Notices(tmp_path / "flushed")
    notices.post(A)
    with (tmp_path / "flushed").open("a") as file:
        file.write(B[:9])
    assert notices.news() == [A]
    with (tmp_path / "flushed").open("a") as file:
        file.write(f"{B[9:]}\n")
    assert notices.news() == [B]


@pytest.mark.parametrize("line", [b"\xff\xfe garbage", b"", A[:-1].encode(), b"\0" * 64, "\u0663".encode() * 64])
def test_a_line_that_is_damaged_counts_as_a_flush_of_everything(tmp_path: Path, line: bytes) -> None:
    notices = Notices(tmp_path / "flushed")
    with (tmp_path / "flushed").open("ab") as file:
        file.write(line + b"\n")
    notices.post(B)
    assert notices.news() == [None, B]


def test_a_file_that_was_begun_anew_or_removed_counts_as_a_flush_of_everything(tmp_path: Path) -> None:
    notices = Notices(tmp_path / "flushed")
    notices.post(A)
    assert notices.news() == [A]
    with (tmp_path / "flushed").open("a") as file:
        file.write("x" * 2**20)
    notices.post(B)
    assert (tmp_path / "flushed").stat().st_size < 2**20
    assert notices.news() == [None]
    assert notices.news() == []
    (tmp_path / "flushed").unlink()
    assert notices.news() == [None]
