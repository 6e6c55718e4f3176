"""Where settings come from, which of them wins, and how a bad one is refused."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from shared import config
from shared.errors import StartupError
from shared.settings import AssemblerSettings, ExecutorSettings, ServerSettings, memory_bytes

EXAMPLE = Path(__file__).parents[3] / "hermes.toml.example"
GIB = 1024**3


@pytest.fixture(autouse=True)
def empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(config.os.environ):
        if name.startswith("HERMES_"):
            monkeypatch.delenv(name)


def refused(*argv: str, cls: type[ServerSettings] = ExecutorSettings) -> str:
    with pytest.raises(StartupError) as caught:
        config.load(cls, list(argv))
    return str(caught.value)


def test_defaults_stand_where_nothing_is_said() -> None:
    settings = config.load(ExecutorSettings, [])
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 50052, "SmolLM2-135M-Instruct")
    assert config.load(AssemblerSettings, []).executor == "127.0.0.1:50052"


def test_flags_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hermes.toml").write_text("[executor]\nport = 1\nmax_running = 1\nmax_waiting = 1\n[assembler]\nport = 9\n")
    monkeypatch.setenv("HERMES_EXECUTOR_PORT", "2")
    monkeypatch.setenv("HERMES_EXECUTOR_MAX_RUNNING", "2")
    monkeypatch.setenv("HERMES_ASSEMBLER_MAX_MESSAGE_BYTES", "2MiB")
    settings = config.load(ExecutorSettings, ["--port", "3"])
    assert (settings.port, settings.max_running, settings.max_waiting, settings.max_children) == (3, 2, 1, 256)
    assert settings.max_message_bytes == 64 * 1024**2
    assert config.load(AssemblerSettings, []).port == 9


def test_settings_built_directly_take_nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_PORT", "2")
    assert ExecutorSettings().port == 50052


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_PORT", "")
    assert config.load(ExecutorSettings, []).port == 50052


def test_a_file_is_found_by_flag_before_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("flag.toml").write_text("[executor]\nport = 1\n")
    Path("variable.toml").write_text("[executor]\nport = 2\n")
    monkeypatch.setenv("HERMES_CONFIG", "variable.toml")
    assert config.load(ExecutorSettings, []).port == 2
    assert config.load(ExecutorSettings, ["--config", "flag.toml"]).port == 1


def test_values_of_every_kind_are_read_from_flags() -> None:
    argv = "--no-prefix-cache --block-size 16 --tls-cert a.pem --tls-key b.pem --max-message-bytes 1GiB --threads 4"
    settings = config.load(ExecutorSettings, [*argv.split(), "--kv-memory=2GiB", "--low-water", "0.5"])
    assert (settings.prefix_cache, settings.block_size, settings.tls_cert) == (False, 16, Path("a.pem"))
    assert (settings.max_message_bytes, settings.threads, settings.low_water) == (GIB, 4, 0.5)
    assert settings.kv_memory == "2GiB"


def test_a_share_of_memory_may_stand_in_the_file_as_a_number() -> None:
    Path("hermes.toml").write_text("[executor]\nkv_memory = 0.8\n")
    assert config.load(ExecutorSettings, []).kv_memory == "0.8"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], "--port: '70000' cannot be used: input should be less than or equal to 65535."),
        (["--device", "tpu"], "--device: 'tpu' cannot be used: input should be 'auto', 'cpu' or 'cuda'."),
        (
            ["--blocksize", "8"],
            "--blocksize is not a setting (did you mean --block-size?); `hermes-executor --help` lists all settings.",
        ),
        (["--kv_memory=1GiB"], "--kv_memory is not a setting (did you mean --kv-memory?); `hermes-executor --help` "),
        (["--block"], "--block is not a setting"),
        (["--port"], "argument --port: expected one argument; `hermes-executor --help` lists all settings."),
        (["stray"], "stray is not a setting"),
        (["--config", "none.toml"], "The file of settings none.toml does not exist; check --config or HERMES_CONFIG."),
        (["--kv-memory", "9" * 400 + "GiB"], "cannot be used: give a size with its unit, such as "),
        (["--drain-seconds", "inf"], "--drain-seconds: 'inf' cannot be used: input should be a finite number."),
        (["--threads", "9" * 20], "cannot be used: input should be less than or equal to 2147483647"),
        (["--metrics-port", "50052"], "port and metrics_port are both 50052: give each its own."),
        (["--kv-memory", "5"], "--kv-memory: '5' cannot be used: give a size with its unit, such as "),
        (["--low-water", "0.95"], "low_water 0.95 must not be above high_water 0.9."),
        (["--tls-cert", "a.pem"], "tls_cert and tls_key belong together: set both or neither."),
        (["--tls-client-ca", "a.pem"], "tls_client_ca needs the server's own tls_cert and tls_key."),
    ],
)
def test_a_bad_flag_is_refused_in_one_sentence(argv: list[str], sentence: str) -> None:
    text = refused(*argv)
    assert sentence in text
    assert "\n" not in text


def test_a_cache_on_disk_has_a_least_size_and_the_assembler_two_ports() -> None:
    small = refused("--cache-disk-bytes", "15MiB", cls=AssemblerSettings)
    assert small.endswith('cannot be used: give at least "16MiB", or 0 to keep prompts in memory alone.')
    assert config.load(AssemblerSettings, ["--cache-disk-bytes", "0"]).cache_disk_bytes == 0
    assert "port and metrics_port are both 9101" in refused("--port", "9101", cls=AssemblerSettings)
    assert "--workers" in refused("--workers", "0", cls=AssemblerSettings)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_MAX_RUNNING", "many")
    assert refused().startswith("HERMES_EXECUTOR_MAX_RUNNING: 'many' cannot be used: input should be a valid integer")


def test_a_variable_that_is_nearly_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_KVMEMORY", "2GiB")
    assert refused() == (
        "The environment variable HERMES_EXECUTOR_KVMEMORY is no setting of hermes-executor (did you mean KV_MEMORY?)."
    )


@pytest.mark.parametrize("slip", ["PROT", "PORF", "POTR"])
def test_a_short_name_with_a_slip_is_recognised(monkeypatch: pytest.MonkeyPatch, slip: str) -> None:
    monkeypatch.setenv(f"HERMES_EXECUTOR_{slip}", "1")
    assert refused().endswith(" is no setting of hermes-executor (did you mean PORT?).")


def test_a_variable_that_is_nothing_like_a_setting_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_WORKERS", "2")
    assert "HERMES_EXECUTOR_WORKERS is no setting of hermes-executor; `hermes-executor --help`" in refused()


def test_what_the_command_line_reads_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_ADDRESS", "127.0.0.1:1")
    assert config.load(ExecutorSettings, []).port == 50052


@pytest.mark.parametrize(
    "address", ["", " ", "foo bar:x:y", "host", "host:", ":1", "host:0", "host:70000", "http://a:1"]
)
def test_an_executor_that_is_no_address_is_refused(address: str) -> None:
    text = refused("--executor", address, cls=AssemblerSettings)
    assert text.startswith(f"--executor: {address!r} cannot be used: ")
    assert "\n" not in text


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50052",
        "gpu-box:1",
        "my_host.example.org:65535",
        "[::1]:50052",
        "[fe80::1%eth0]:1",
        "unix:/run/x",
        "dns:///executor:50052",
        "ipv4:10.0.0.1:1,10.0.0.2:1",
        "xds:///executor",
    ],
)
def test_every_address_that_grpc_takes_may_be_the_executor(address: str) -> None:
    assert config.load(AssemblerSettings, ["--executor", address]).executor == address


def test_what_kubernetes_adds_is_passed_over_or_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_EXECUTOR_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HERMES_EXECUTOR_PORT_50052_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("HERMES_EXECUTOR_HEADLESS_SERVICE_PORT_GRPC", "50052")
    assert config.load(ExecutorSettings, []).port == 50052
    monkeypatch.setenv("HERMES_EXECUTOR_METRICS_PORT", "tcp://10.0.0.1:50052")
    assert "enableServiceLinks: false" in refused()
    monkeypatch.delenv("HERMES_EXECUTOR_METRICS_PORT")
    monkeypatch.setenv("HERMES_EXECUTOR_PORT", "tcp://10.0.0.1:50052")
    assert "enableServiceLinks: false" in refused()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[executor]\nport = true_\n", "The file of settings hermes.toml cannot be read: "),
        ("[executor]\nprt = 1\n", "hermes.toml sets prt in [executor], which is no setting (did you mean port?)."),
        ("port = 1\n", "hermes.toml has port outside of its tables; settings stand in [assembler] or [executor]."),
        ("[server]\nport = 1\n", "hermes.toml has a table [server], which nothing reads; settings stand in [assem"),
        ("[exectuor]\nport = 1\n", "hermes.toml has a table [exectuor], which nothing reads (did you mean executor?)"),
        ("[executor]\nprot = 1\n", "hermes.toml sets prot in [executor], which is no setting (did you mean port?)."),
        ("[executor]\nhorst = 1\n", "hermes.toml sets horst in [executor], which is no setting (did you mean host?)."),
        ("executor = 1\n", "hermes.toml has executor outside of its tables"),
        ('[executor]\nport = "x"\n', "port in [executor] of hermes.toml: 'x' cannot be used: input should be a valid"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    Path("hermes.toml").write_text(text)
    answer = refused()
    assert answer.startswith(sentence)
    assert "\n" not in answer


def test_the_other_services_table_is_not_read() -> None:
    Path("hermes.toml").write_text("[assembler]\nport = 1\nno_such = 1\n")
    assert config.load(ExecutorSettings, []).port == 50052


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])  # noqa: S104  it is what is refused
def test_a_host_that_others_can_reach_needs_tls_or_insecure(host: str) -> None:
    assert f"host {host} lets other machines connect" in refused("--host", host)
    assert config.load(ExecutorSettings, ["--host", host, "--insecure"]).host == host
    assert config.load(ExecutorSettings, ["--host", host, "--tls-cert", "a", "--tls-key", "b"]).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert config.load(ExecutorSettings, ["--host", host]).host == host


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * GIB), ("1.5 gib", 3 * GIB // 2), ("500MB", 500_000_000), ("0.8", 80), ("1", 100), ("512KiB", 2**19)],
)
def test_memory_is_a_size_or_a_share(text: str, size: int) -> None:
    assert memory_bytes(text, free=100) == size


@pytest.mark.parametrize("text", ["", "0", "1.1", "-1GiB", "4G", "0GiB", "lots", "nan"])
def test_memory_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a size with its unit"):
        memory_bytes(text, free=100)


@pytest.mark.parametrize("cls", [AssemblerSettings, ExecutorSettings])
def test_help_lists_every_setting_with_flag_variable_and_description(
    cls: type[ServerSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        config.load(cls, ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for name, field in cls.model_fields.items():
        (line,) = (line for line in text.splitlines() if re.match(rf"  --{name.replace('_', '-')}[ ,]", line))
        part = " ".join(text[text.index(line) :].split())
        assert field.description is not None
        assert field.description in part
        assert f"[env: HERMES_{cls.service.upper()}_{name.upper()}]" in part
    assert "--config FILE" in text


def one_of(annotation: Any) -> str:
    """The values that a setting can have, where those are words."""
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    return f" One of {', '.join(choices)}." if choices and set(map(type, choices)) == {str} else ""


@pytest.mark.parametrize("cls", [AssemblerSettings, ExecutorSettings])
def test_the_example_file_agrees_with_the_settings(cls: type[ServerSettings]) -> None:
    """Each setting stands there once, in order, after its description; without its comment sign it is the default."""
    (section,) = re.findall(rf"^\[{cls.service}\]$(.*?)(?=^\[|\Z)", EXAMPLE.read_text(), re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^# (.+)\n#(\w+) = (.+)$", section, re.MULTILINE)
    assert [name for _, name, _ in entries] == list(cls.model_fields)
    values: dict[str, Any] = {}
    for description, name, value in entries:
        field = cls.model_fields[name]
        expected = f"{field.description}{one_of(field.annotation)}"
        if field.default is None:
            assert description == f"{expected} (not set)"
        else:
            assert description == expected
            values |= tomllib.loads(f"{name} = {value}")
    assert cls(**values) == cls()


def test_the_example_file_can_be_used_as_it_is() -> None:
    assert config.load(ExecutorSettings, ["--config", str(EXAMPLE)]) == ExecutorSettings()
    assert config.load(AssemblerSettings, ["--config", str(EXAMPLE)]) == AssemblerSettings()
