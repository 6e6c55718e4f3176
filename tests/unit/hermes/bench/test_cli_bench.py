import io
import json
import sys

import pytest

from hermes import cli
from hermes.bench.report import read, write
from shared import extras
from shared.errors import resource_exhausted
from tests.unit.hermes.bench.runs import report, run

SMALL = ("--users", "2", "--rounds", "2", "--concurrency", "2", "--max-tokens", "4", "--words", "20", "--question", "5")


@pytest.fixture
def bench(assembler, admin, monkeypatch, capsys):
    """Runs `hermes bench` against the fakes; returns exit code, standard output, standard error."""

    def call(*arguments: str):
        monkeypatch.setenv("HERMES_ADDRESS", assembler.address)
        monkeypatch.setenv("HERMES_EXECUTOR_ADDRESS", admin.address)
        monkeypatch.setattr(sys, "argv", ["hermes", "bench", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


def test_a_workload_runs_with_the_caches_on_and_off_and_is_shown(bench, assembler):
    code, out, err = bench("run", "service", *SMALL)
    assert code == 0, err
    assert "service: 2 users × 2 rounds" in out
    assert "caches on" in out
    assert "caches off" in out
    assert len(assembler.requests) == 2 * (4 + 2)  # two settings: the run, and its warm-up
    assert "seed " in err


def test_without_names_all_workloads_run_and_no_series(bench, tmp_path):
    file = tmp_path / "report.json"
    assert bench("run", "--caches", "on", *SMALL, "--out", str(file))[0] == 0
    assert [each.load.workload for each in read(file).runs] == ["service", "questions", "code", "rag", "unique"]
    assert not any(each.series for each in read(file).runs)


def test_a_series_runs_by_its_name(bench, tmp_path):
    file = tmp_path / "report.json"
    code, out, _ = bench(
        "run", "concurrency", "--caches", "off", "--max-tokens", "2", "--words", "5", "--out", str(file)
    )
    assert code == 0
    assert "concurrency: how figures change" in out
    assert [each.load.concurrency for each in read(file).runs] == [1, 2, 4, 8, 16, 32, 64]


def test_the_file_tells_the_machine_the_command_and_each_seed(bench, tmp_path):
    file = tmp_path / "report.json"
    assert bench("run", "unique", *SMALL, "--seed", "7", "--runs", "2", "--out", str(file))[0] == 0
    found = read(file)
    assert found.command[:3] == ("bench", "run", "unique")
    assert found.machine.cores >= 1
    assert [(each.seed, each.caches) for each in found.runs] == [(7, "on"), (7, "off"), (8, "off"), (8, "on")]
    assert all(len(each.exchanges) == 4 for each in found.runs)


def test_json_is_one_object_with_the_figures(bench):
    code, out, _ = bench("run", "service", "--caches", "on", *SMALL, "--json")
    assert code == 0
    (run_,) = json.loads(out)["runs"]
    assert run_["figures"]["prompt_tokens"] == 4 * 9


def test_failed_requests_are_said_and_the_exit_code_is_1(bench, assembler, tmp_path):
    events, asked = assembler.events, []

    class Failing(list):
        def __iter__(self):
            asked.append(None)
            if len(asked) > 2:  # the warm-up goes well
                assembler.error = resource_exhausted("QUEUE_FULL", "There is too much load.", retry_after=1)
                return iter([])
            return iter(events)

    assembler.events = Failing()
    file = tmp_path / "report.json"
    code, out, err = bench("run", "service", "--caches", "on", *SMALL, "--out", str(file))
    assert code == 1
    assert "4 requests failed: QUEUE_FULL: There is too much load." in err
    assert [line.split()[-1] for line in out.splitlines() if line.strip().startswith("errors")] == ["4"]
    assert len(read(file).runs[0].exchanges) == 4


def test_a_server_that_is_not_there_is_one_sentence(bench, assembler):
    code, out, err = bench("run", "service", *SMALL, "--address", "127.0.0.1:1", "--executor", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "hermes:127.0.0.1:1 cannot be measured: No assembler can be reached at 127.0.0.1:1" in err
    assert "Traceback" not in err


def test_a_file_that_cannot_be_written_is_said_before_anything_is_sent(bench, assembler, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = bench("run", "service", *SMALL, "--out", str(tmp_path / "file" / "report.json"))
    assert (code, out) == (1, "")
    assert "cannot be written" in err
    assert "Traceback" not in err
    assert not assembler.requests


def test_servers_of_both_kinds_are_compared_over_three_runs_with_ratios(bench, assembler, peer, tmp_path):
    file = tmp_path / "report.json"
    servers = [f"hermes:{assembler.address}", f"openai:{peer.url}"]
    code, out, err = bench("compare", *servers, *SMALL, "--seed", "1", "--ignore-eos", "--out", str(file))
    assert code == 0, err
    assert "medians of 3 runs" in out
    assert f"÷ openai:{peer.url}" in out
    found = read(file)
    ours, theirs = servers
    order = [(ours, 1), (theirs, 1), (theirs, 2), (ours, 2), (ours, 3), (theirs, 3)]
    assert [(each.target, each.seed) for each in found.runs] == order
    assert found.targets[theirs] == {"id": "fake", "max_model_len": 4096}
    assert not any(each.failure for run_ in found.runs for each in run_.exchanges)
    assert {each.cached_tokens for each in found.runs[1].exchanges} == {2}
    (theirs_first,) = [body for body in peer.bodies if body["max_tokens"] == 4 and len(body["messages"]) == 2][:1]
    ours_first = next(each for each in assembler.requests if each.stopping.max_tokens == 4)
    assert {message.content for message in ours_first.prompt.chat.messages if message.role == "system"} == {
        theirs_first["messages"][0]["content"]
    }
    assert theirs_first["ignore_eos"] is ours_first.stopping.ignore_eos is True


def test_one_server_of_the_other_kind_runs_with_its_caches_as_they_are(bench, peer):
    code, out, err = bench("run", "service", "--target", f"openai:{peer.url}/v1/", *SMALL, "--extra", '{"top_k": 1}')
    assert code == 0, err
    assert "caches on" in out
    assert "caches off" not in out
    assert len(peer.bodies) == 4 + 2
    assert all(body["top_k"] == 1 and body["model"] == "fake" for body in peer.bodies)


WRONG = {
    "no such load": (("run", "chess"), "'chess' is no load"),
    "no such kind of server": (("run", "--target", "grpc:a:1"), "names no server"),
    "no URL": (("run", "--target", "openai:127.0.0.1:8000"), "no URL"),
    "no address": (("run", "--target", "hermes:nowhere"), "cannot be used"),
    "caches of another server": (("run", "--target", "openai:http://a", "--caches", "off"), "kept out of its cache"),
    "extra that is no JSON": (("run", "--extra", "{"), "is not JSON"),
    "extra that is no object": (("run", "--extra", "[1]"), "JSON object"),
    "no users": (("run", "--users", "0"), "--users"),
    "one server": (("compare", "hermes:a:1", "hermes:a:1"), "two different servers"),
    "too few runs": (("compare", "hermes:a:1", "hermes:b:1", "--runs", "2"), "--runs"),
    "no report": (("plot", "/nowhere/report.json", "plots"), "cannot be read"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_said_before_anything_is_sent(bench, assembler, arguments, said):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not assembler.requests


def test_a_package_that_is_missing_is_said_before_anything_is_sent(bench, assembler, monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    for arguments in (("--plots", str(tmp_path)), ("--target", "openai:http://127.0.0.1:1")):
        code, _, err = bench("run", *SMALL, *arguments)
        assert code == 2
        assert "pip install 'hermes-serving[bench]'" in err
    assert not assembler.requests


def test_the_pictures_of_an_earlier_report_are_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra bench is not installed")
    write(report(run()), tmp_path / "report.json")
    code, out, err = bench("plot", str(tmp_path / "report.json"), str(tmp_path / "plots"), "--format", "png")
    assert code == 0, err
    assert "TTFT, first round" in out
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "ttft-by-round-service.png",
        "hits-over-time-service.png",
        "prefill.png",
    }
