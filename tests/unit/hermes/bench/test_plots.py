from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the extra bench is not installed")

from hermes.bench.loads import Caches, Workload
from hermes.bench.plan import Series
from hermes.bench.plots import draw
from tests.unit.hermes.bench.runs import LOAD, exchange, report, run

SIGNATURES = {"svg": b"<?xml", "png": b"\x89PNG"}


def series(which: Series) -> list:
    loads = [
        replace(LOAD, workload=Workload.QUESTIONS, users=size, concurrency=size, words=100 * size) for size in (1, 2, 4)
    ]
    return [run(caches, series=which, load=load) for load in loads for caches in Caches]


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_every_picture_of_a_report_is_written(tmp_path, suffix):
    alone = [run(caches, load=replace(LOAD, workload=workload)) for workload in Workload for caches in Caches]
    growing = [each for which in Series for each in series(which)]
    files = draw(report(*alone, *growing), tmp_path / "plots", suffix)
    by_workload = {f"{kind}-{workload}" for kind in ("ttft-by-round", "hits-over-time") for workload in Workload}
    assert {file.stem for file in files} == {*by_workload, "prefill", *Series}
    for file in files:
        assert file.suffix == f".{suffix}"
        assert file.read_bytes().startswith(SIGNATURES[suffix])


def test_a_picture_says_what_its_axes_and_lines_are(tmp_path):
    draw(report(*series(Series.CONCURRENCY)), tmp_path, "svg")
    picture = (tmp_path / "concurrency.svg").read_text()
    for text in ("requests at a time", "output tokens a second", "caches on", "caches off"):
        assert f"<!-- {text} -->" in picture


def test_the_same_report_gives_the_same_files(tmp_path):
    told = report(run(), *series(Series.USERS))
    first, second = (
        {file.name: file.read_bytes() for file in draw(told, tmp_path / name, "svg")} for name in ("a", "b")
    )
    assert first == second


def test_servers_beside_each_other_have_a_line_each(tmp_path):
    draw(report(run(target="hermes:a:1"), run(target="openai:http://b")), tmp_path, "svg")
    picture = (tmp_path / "ttft-by-round-service.svg").read_text()
    assert "<!-- hermes:a:1 -->" in picture
    assert "<!-- openai:http://b -->" in picture


def test_runs_without_answers_are_drawn_without_them(tmp_path):
    failed = tuple(exchange(place=place, failure="GONE: no.") for place in range(2))
    growing = [replace(each, exchanges=failed) for which in Series for each in series(which)]
    files = draw(report(run(exchanges=failed), *growing), tmp_path, "svg")
    assert len(files) == 6
