import io
import json
import sys

import pytest
from google.protobuf.duration_pb2 import Duration

from hermes import cli
from hermes.v1 import assembler_pb2, executor_pb2
from shared.errors import failed_precondition, not_found, resource_exhausted, unavailable


@pytest.fixture
def cache(assembler, admin, monkeypatch, capsys):
    """Runs `hermes cache` against the fakes; returns exit code, standard output, standard error."""

    def run(*arguments: str, stdin: str = ""):
        monkeypatch.setenv("HERMES_ADDRESS", assembler.address)
        monkeypatch.setenv("HERMES_EXECUTOR_ADDRESS", admin.address)
        monkeypatch.setattr(sys, "argv", ["hermes", "cache", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def asked(assembler):
    (request,) = assembler.requests
    return [(m.role, m.content) for m in request.prompt.chat.messages], request.prompt.chat.add_generation_prompt


def test_tree_shows_counters_hit_rate_and_branches(cache, admin):
    code, out, err = cache("tree", "--namespace", "team-a", "--branches", "5")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["nodes", "4"] in lines
    assert ["hit", "rate", "25.0%", "of", "prompt", "tokens"] in lines
    assert lines[-1] == ["7", "0", "0", "64", "2", "0", "3", "90", "pinned", "team-a"]
    assert admin.requests == [executor_pb2.DescribeTreeRequest(namespace="team-a", max_branches=5)]


def test_tree_of_an_idle_executor_has_no_rate_and_no_table(cache, admin):
    admin.tree = executor_pb2.DescribeTreeResponse()
    code, out, _ = cache("tree")
    assert code == 0
    assert "rate" not in out
    assert "branch " not in out


def test_tree_shows_a_namespace_as_it_is(cache, admin):
    namespace = "[bold]" + "x" * 200
    admin.tree = executor_pb2.DescribeTreeResponse(branches=[executor_pb2.Branch(id=1, namespace=namespace)])
    assert namespace in cache("tree")[1]


def test_tree_json_is_one_object(cache):
    code, out, _ = cache("tree", "--json")
    told = json.loads(out)
    assert (code, told["nodes"], told["cached_tokens"]) == (0, 4, 50)
    (branch,) = told["branches"]
    assert (branch["id"], branch["idle"], branch["pinned"], branch["head_token_ids"]) == (7, 90.0, True, [1])


def test_warm_sends_the_beginning_of_the_prompt_and_opens_no_answer(cache, assembler, admin):
    code, out, err = cache("warm", "hi", "--system", "Be brief.", "--namespace", "a")
    assert (code, out, err) == (0, "", "1 tokens were there, 2 were computed\n")
    assert asked(assembler) == ([("system", "Be brief."), ("user", "hi")], False)
    assert admin.requests == [executor_pb2.WarmPrefixRequest(token_ids=[1, 4093, 198], namespace="a")]


def test_warm_takes_a_system_message_alone_or_a_message_from_standard_input(cache, assembler):
    assert cache("warm", "--system", "Be brief.")[0] == 0
    assert asked(assembler) == ([("system", "Be brief.")], False)
    assembler.requests.clear()
    assert cache("warm", "-", stdin="Grüße\n")[0] == 0
    assert asked(assembler) == ([("user", "Grüße")], False)


def test_warm_takes_raw_text(cache, assembler):
    assert cache("warm", "Once upon", "--raw")[0] == 0
    assert assembler.requests[0].prompt.text == "Once upon"


@pytest.mark.parametrize("arguments", [[], ["--raw"], ["hi", "--raw", "--system", "x"], ["--raw", "--system", "x"]])
@pytest.mark.parametrize("command", ["warm", "pin"])
def test_a_beginning_that_is_none_is_wrong_usage(cache, assembler, admin, command, arguments):
    code, out, err = cache(command, *arguments)
    assert (code, out) == (2, "")
    assert "--system" in err
    assert assembler.requests == admin.requests == []


def test_pin_prints_the_name_alone(cache, admin):
    code, out, err = cache("pin", "hi", "--for", "1.5")
    assert (code, out) == (0, "pin-1\n")
    assert "kept for 1.5 s" in err
    assert admin.requests[0].pin.ToMilliseconds() == 1500


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e30"])
def test_a_pin_for_no_time_or_for_ever_is_wrong_usage(cache, admin, value):
    code, out, err = cache("pin", "hi", "--for", value)
    assert (code, out) == (2, "")
    assert "--for" in err
    assert "Traceback" not in err
    assert admin.requests == []


def test_unpin_and_flush(cache, admin):
    assert cache("unpin", "pin-1") == (0, "", "")
    assert cache("flush", "--namespace", "a", "--only", "tree") == (0, "", "12 blocks were freed\n")
    assert [request.SerializeToString() for request in admin.requests] == [
        executor_pb2.UnpinPrefixRequest(pin_id="pin-1").SerializeToString(),
        executor_pb2.FlushTreeRequest(namespace="a").SerializeToString(),
    ]


def test_flush_empties_both_caches_or_the_one_that_is_named(cache, assembler, admin):
    forgotten, freed = "5 prompts and beginnings are forgotten\n", "12 blocks were freed\n"
    assert cache("flush") == (0, "", forgotten + freed)
    assert cache("flush", "--only", "prompts", "--namespace", "b") == (0, "", forgotten)
    assert assembler.flushes == ["", "b"]
    assert admin.requests == [executor_pb2.FlushTreeRequest()]


def test_flush_empties_the_one_that_can_be_reached_and_says_that_the_other_cannot(cache, assembler):
    assembler.error = unavailable("CACHE_UNAVAILABLE", "The disk is away.")
    assert cache("flush") == (1, "", "hermes: The disk is away.\n12 blocks were freed\n")
    assembler.error = None
    code, _, err = cache("flush", "--executor", "127.0.0.1:1")
    assert code == 1
    assert err.startswith("5 prompts and beginnings are forgotten\nhermes: No executor can be reached")


INSIGHT = assembler_pb2.GetInsightResponse(
    namespaces=[
        assembler_pb2.NamespaceInsight(
            namespace="shop\x1b[1m",
            prompts=40,
            causes=[
                assembler_pb2.Cause(
                    code="DYNAMIC_PREFIX",
                    remedy="Move the date to the last user message.",
                    prompts=30,
                    tokens=9000,
                    idle=Duration(seconds=3),
                ),
                assembler_pb2.Cause(code="ROLE_ORDER", remedy="Take turns.", prompts=1, idle=Duration(seconds=70)),
            ],
        ),
        assembler_pb2.NamespaceInsight(prompts=2),
    ],
    rewrites=[assembler_pb2.Rewrite(message="It drops reasoning.", remedy="Serve another.")],
)


def test_insight_shows_causes_with_their_remedies_the_costliest_first(cache, assembler):
    assembler.insight = INSIGHT
    shown = (
        "It drops reasoning. Serve another.\n"
        "namespace 'shop\\x1b[1m': 40 recent prompts\n"
        "  DYNAMIC_PREFIX: 30 prompts, 9000 tokens computed again, last 3 s ago\n"
        "    Move the date to the last user message.\n"
        "  ROLE_ORDER: 1 prompt, last 70 s ago\n"
        "    Take turns.\n"
        "no namespace: 2 recent prompts, nothing to tell\n"
    )
    assert cache("insight", "--namespace", "shop") == (0, shown, "")
    assert assembler.insights == ["shop"]


def test_insight_as_json_has_the_contracts_names(cache, assembler):
    assembler.insight = INSIGHT
    told = json.loads(cache("insight", "--json")[1])
    first = told["namespaces"][0]
    assert (first["namespace"], first["prompts"], first["causes"][0]["tokens"]) == ("shop\x1b[1m", 40, 9000)
    assert first["causes"][1]["idle"] == 70
    assert told["rewrites"] == [{"message": "It drops reasoning.", "remedy": "Serve another."}]


def test_insight_that_is_not_to_be_had_is_said(cache, assembler):
    assert cache("insight") == (0, "", "no prompts yet\n")
    assembler.error = failed_precondition("INSIGHT_OFF", "This server does not look at prompts.")
    assert cache("insight") == (1, "", "hermes: This server does not look at prompts.\n")


def test_stats_show_both_caches_with_their_hit_rates(cache):
    code, out, err = cache("stats")
    assert (code, err) == (0, "")
    prompts, tree = out.split("tree:\n")
    assert "75.0% of prompt tokens" in prompts
    assert "25.0% of prompt tokens" in tree
    lines = [line.split() for line in prompts.splitlines()]
    assert ["memory_hits", "1"] in lines
    told = json.loads(cache("stats", "--json")[1])
    assert (told["prompts"]["lookups"], told["tree"]["nodes"]) == (3, 4)


def test_stats_of_the_one_that_can_be_reached_are_shown(cache):
    code, out, err = cache("stats", "--address", "127.0.0.1:1")
    assert (code, out.startswith("tree:\n")) == (1, True)
    assert err.startswith("hermes: No assembler can be reached at 127.0.0.1:1")
    assert json.loads(cache("stats", "--json", "--address", "127.0.0.1:1")[1])["prompts"] is None


def test_an_error_of_the_executor_is_its_sentence(cache, admin):
    admin.error = not_found("UNKNOWN_PIN", "There is no such pin.")
    assert cache("unpin", "x") == (1, "", "hermes: There is no such pin.\n")
    admin.error = resource_exhausted("PIN_LIMIT", "Too many pins.", retry_after=60)
    assert cache("pin", "hi") == (1, "", "hermes: Too many pins.\n")


@pytest.mark.parametrize("arguments", [["tree"], ["warm", "hi"], ["pin", "hi"], ["unpin", "x"]])
def test_nobody_at_the_executors_address_is_one_sentence(cache, arguments):
    code, out, err = cache(*arguments, "--executor", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("hermes: No executor can be reached at 127.0.0.1:1 (is it started?")


@pytest.mark.parametrize("arguments", [["tree", "--branches", "9" * 12], ["tree", "--branches", "0"]])
def test_a_number_out_of_range_is_wrong_usage(cache, arguments):
    code, out, err = cache(*arguments)
    assert (code, out) == (2, "")
    assert "branches" in err
    assert "Traceback" not in err
