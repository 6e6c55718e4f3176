from pathlib import Path

from assembler.cache.notices import Notices


def test_each_process_hears_once_what_was_flushed_since_it_began(tmp_path: Path) -> None:
    one = Notices(tmp_path / "flushed")
    one.post("a")
    two = Notices(tmp_path / "flushed")
    assert (one.news(), two.news()) == (["a"], [])
    two.post("b")
    two.post(None)
    assert (one.news(), two.news()) == (["b", None], ["b", None])
    assert (one.news(), two.news()) == ([], [])


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    notices = Notices(tmp_path / "flushed")
    notices.post("abc")
    with (tmp_path / "flushed").open("a") as file:
        file.write("de")
    assert notices.news() == ["abc"]
    with (tmp_path / "flushed").open("a") as file:
        file.write("f\n")
    assert notices.news() == ["def"]


def test_a_file_that_was_begun_anew_or_removed_counts_as_a_flush_of_everything(tmp_path: Path) -> None:
    notices = Notices(tmp_path / "flushed")
    notices.post("a")
    assert notices.news() == ["a"]
    for _ in range(110):
        notices.post("x" * 10_000)
    assert (tmp_path / "flushed").stat().st_size < 2**20
    assert notices.news() == [None]
    assert notices.news() == []
    (tmp_path / "flushed").unlink()
    assert notices.news() == [None]
