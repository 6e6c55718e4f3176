import io
import json
import os
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hermes.bench.figures import figures_of
from hermes.bench.groups import groups_of
from hermes.bench.loads import Caches, Workload
from hermes.bench.machine import this_machine
from hermes.bench.report import SCHEMA, read, write
from hermes.bench.tables import tables_of
from shared.errors import StartupError
from tests.unit.hermes.bench.runs import LOAD, exchange, report, run


def test_a_report_is_read_as_it_was_written(tmp_path):
    told = report(run(Caches.ON), run(Caches.OFF, exchanges=(exchange(), exchange(failure="GONE: no."))))
    file = tmp_path / "deep" / "report.json"
    write(told, file)
    assert read(file) == told
    assert os.listdir(file.parent) == ["report.json"]


def test_the_file_has_a_version_every_request_and_the_figures(tmp_path):
    file = tmp_path / "report.json"
    write(report(run()), file)
    found = json.loads(file.read_text())
    assert set(found) == {"schema", "command", "machine", "targets", "runs"}
    assert found["schema"] == SCHEMA == "hermes-bench/1"
    (told,) = found["runs"]
    assert set(told) == {
        "target", "load", "caches", "seed", "series", "started", "seconds", "client_cpu_seconds", "warm_up",
        "warm_up_failures", "exchanges", "figures",
    }  # fmt: skip
    assert set(told["exchanges"][0]) == {
        "user", "round", "begin", "seconds", "pieces", "prompt_tokens", "cached_tokens", "assembly_cached_tokens",
        "completion_tokens", "engine_seconds", "failure",
    }  # fmt: skip
    assert (len(told["exchanges"]), told["load"]["workload"], told["caches"]) == (4, "service", "on")
    assert told["figures"]["computed_tokens"] == figures_of(run()).computed_tokens
    assert told["figures"]["ttft"]["median"] == pytest.approx(0.4)


def test_a_file_with_fields_of_a_later_writer_is_read(tmp_path):
    file = tmp_path / "report.json"
    write(report(run()), file)
    found = json.loads(file.read_text())
    found["runs"][0]["new"] = found["new"] = 1
    file.write_text(json.dumps(found))
    assert read(file) == report(run())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "its schema is None"),
        ('{"schema": "hermes-bench/9"}', "'hermes-bench/9', not 'hermes-bench/1'"),
        ('{"schema": "hermes-bench/1"}', "command"),
        ("\xff", "not JSON"),
    ],
)
def test_what_is_no_report_is_refused_with_a_sentence(tmp_path, text, said):
    file = tmp_path / "report.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(StartupError) as error:
        read(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_the_machine_has_a_processor_cores_and_memory():
    machine = this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**28


def shown(*runs) -> list[str]:
    """The tables' lines."""
    console = Console(width=200, file=io.StringIO())
    for table in tables_of(groups_of(runs)):
        console.print(table)
    return console.file.getvalue().splitlines()


def row(lines: list[str], title: str) -> list[str]:
    """The cells of one row, without its title and unit."""
    (line,) = [line.strip() for line in lines if line.strip().startswith(title)]
    return re.split(r"\s{2,}", line)[1:]


def test_a_load_has_a_table_with_the_caches_on_beside_off_and_ratios():
    off = run(Caches.OFF, seconds=4.0, exchanges=tuple(exchange(place=at, cached_tokens=0) for at in range(2)))
    lines = shown(off, run(Caches.ON))
    assert row(lines, "output") == ["8.0", "2.0", "×4.00"]
    assert row(lines, "TTFT, first round") == ["400", "400", "×1.00"]
    assert lines[0].startswith("service: 2 users × 2 rounds")


def test_several_servers_have_a_column_each_and_ratios_with_their_span():
    ours = [run(seed=seed, target="hermes:a:1", seconds=seed) for seed in (1, 2, 4)]
    theirs = [run(seed=seed, target="openai:http://b", seconds=4.0) for seed in (1, 2, 4)]
    lines = shown(*ours, *theirs)
    assert "medians of 3 runs" in lines[0]
    assert row(lines, "output") == ["8.0", "4.0", "×2.00 (1.00–4.00)"]


def test_errors_are_shown_in_every_table():
    failed = run(exchanges=(exchange(), exchange(failure="GONE: no.")))
    alone = shown(failed)
    assert row(alone, "errors") == ["1"]
    (in_a_series,) = [line for line in shown(replace(failed, series="users")) if "caches on" in line]
    assert in_a_series.split()[-1] == "1"


def test_a_series_is_one_table_with_a_row_for_each_size():
    runs = [
        run(caches, series="users", load=replace(LOAD, users=users, workload=Workload.QUESTIONS))
        for users in (1, 2, 64)
        for caches in Caches
    ]
    lines = shown(*runs)
    rows = [line.split() for line in lines if "caches o" in line]
    assert [(each[0], each[4]) for each in rows] == [
        (users, caches) for users in ("1", "2", "64") for caches in ("on", "off")
    ]
