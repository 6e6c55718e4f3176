"""Settings of each service: one class each, from flags, environment, hermes.toml and defaults, in that order."""

import argparse
import difflib
import ipaddress
import operator
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, NoReturn, TypeVar

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.addresses import check_target
from shared.errors import StartupError

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
CONFIG_FILE: Final = "hermes.toml"
CONFIG_VARIABLE: Final = "HERMES_CONFIG"

_MIB: Final = 1024**2
_MAX_MESSAGE: Final = 2**31 - 1  # gRPC keeps message sizes in 32 signed bits
_MEMORY_UNITS: Final = {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MAX_UNITS: Final = 2**40  # more than any machine has of any unit, and still a number of bytes
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", re.IGNORECASE)

_OTHERS: Final = frozenset({"HERMES_EXECUTOR_ADDRESS"})  # the command line's, under the same prefix
# Kubernetes adds variables under the same prefix for a Service of that name, or of one that begins so.
_KUBERNETES: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

S = TypeVar("S", bound="ServerSettings")
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ServerSettings(BaseSettings):
    """What both services can be told. Built directly, it takes nothing from the environment; `load` does."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    service: ClassVar[str] = "server"
    """Names the table in hermes.toml, and the program and its environment variables with it."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback, TLS or insecure.")
    port: int = Field(ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    insecure: bool = Field(default=False, description="Serve without TLS even where other machines can connect.")
    tls_cert: Path | None = Field(default=None, description="PEM file of the server's certificate chain.")
    tls_key: Path | None = Field(default=None, description="PEM file of the server's private key.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file that callers' certificates must be signed by."
    )
    max_message_bytes: ByteSize = Field(
        default=ByteSize(64 * _MIB), ge=_MIB, le=_MAX_MESSAGE, description='Largest gRPC message, for example "64MiB".'
    )
    reflection: bool = Field(default=True, description="Let tools such as grpcurl ask for the services' descriptions.")
    drain_seconds: float = Field(default=30.0, ge=0, description="Time that running calls get to end after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What is logged.")
    log_format: Literal["human", "json", "auto"] = Field(
        default="human", description="Shape of the log; auto is human on a terminal, and json elsewhere."
    )
    model: str = Field(default=DEFAULT_MODEL, description="Model directory, or name of a prepared model.")
    model_name: str | None = Field(default=None, description="Name that callers use for it; else the model's own.")

    @model_validator(mode="after")
    def _safe(self) -> "ServerSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs the server's own tls_cert and tls_key")
        if self.tls_cert is None and not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} lets other machines connect: set tls_cert and tls_key, or insecure to do without"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  pydantic-settings passes these by name
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` has gathered, so that an error can name where a value came from."""
        return (init_settings,)


class AssemblerSettings(ServerSettings):
    """Settings of the assembler."""

    service = "assembler"

    port: int = Field(default=50051, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    executor: str = Field(default="127.0.0.1:50052", description="Address of the executor.")
    unknown_role: Literal["error", "user"] = Field(
        default="error", description="A role that chat models do not know is refused, or read as the user's."
    )
    template: str | None = Field(
        default=None,
        description="Chat template: a built-in one's name, or a .jinja or .toml file; else the model's own.",
    )
    control_text: Literal["encode", "reject"] = Field(
        default="encode", description="Control tokens in a caller's texts are encoded as plain text, or refused."
    )
    merge_system: bool = Field(
        default=True,
        description="Where the template refuses a chat, join its system messages, or put them to the user's.",
    )
    merge_same_role: bool = Field(
        default=True, description="Where the template refuses a chat, join messages of one role that follow each other."
    )
    strict: bool = Field(
        default=False, description="Refuse chats with roles out of order or tool results that answer no call."
    )
    tool_calls: Literal["auto", "none", "hermes", "llama3", "mistral"] = Field(
        default="auto",
        description="How the model writes tool calls; auto asks its chat template, none leaves them text.",
    )
    reasoning: Literal["auto", "none"] = Field(
        default="auto", description="Tell reasoning from text by the chat template's marks, or leave it text."
    )
    log_prompts: Literal["off", "head_tail"] = Field(
        default="off", description="Log the first and last characters of each prompt, for debugging."
    )

    @field_validator("executor")
    @classmethod
    def _target(cls, value: str) -> str:
        check_target(value)
        return value


class ExecutorSettings(ServerSettings):
    """Settings of the executor."""

    service = "executor"

    port: int = Field(default=50052, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    metrics_port: int = Field(9102, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 takes a free one.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number format of weights, keys and values; auto is what suits the device."
    )
    threads: Positive | None = Field(
        default=None, description="Threads that an operation on the CPU uses; else torch's."
    )
    kv_memory: str = Field(
        default="1GiB",
        description='Memory for keys and values: "4GiB", or "0.8" for a share of what is free on the GPU.',
    )
    block_size: Literal["auto"] | Positive = Field(default="auto", description="Tokens in a block of keys and values.")
    max_batch_tokens: Positive = Field(default=512, description="Tokens that one step may process.")
    max_running: Positive = Field(default=32, description="Requests that decode together.")
    max_waiting: Positive = Field(default=256, description="Requests that may wait; more are refused.")
    prompt_timeout_seconds: float = Field(default=30.0, gt=0, description="Time that a caller has to send its prompt.")
    retry_after_seconds: float = Field(default=1.0, gt=0, description="When a refused caller is told to come back.")
    watchdog_seconds: float = Field(
        default=120.0, gt=0, description="A step that takes longer turns health to NOT_SERVING."
    )
    show_prompts: bool = Field(default=False, description="Let DescribeTree show the first token ids of branches.")
    prefix_cache: bool = Field(default=True, description="Keep keys and values of prompts for later requests.")
    eviction: Literal["lru", "lfu_aged"] = Field(default="lru", description="Which cached prefix goes first.")
    high_water: Share = Field(default=0.90, description="Share of blocks in use at which cached prefixes are dropped.")
    low_water: Share = Field(default=0.80, description="Share of blocks in use down to which they are dropped.")
    max_cached_nodes: Positive | None = Field(default=None, description="Most nodes of the prefix tree; else no limit.")
    max_cached_tokens: Positive | None = Field(
        default=None, description="Most tokens in the prefix tree; else no limit."
    )
    max_children: Positive = Field(default=256, description="Most branches under one node of the prefix tree.")
    max_roots: Positive = Field(default=1024, description="Most namespaces that the prefix tree keeps.")
    namespace_share: Share = Field(default=1.0, description="Share of the cache that one namespace may fill.")
    max_pinned: float = Field(default=0.5, ge=0, lt=1, description="Share of the blocks that pins may hold together.")
    min_cached_tokens: Positive = Field(default=1, description="Prompts shorter than this are not kept.")
    min_copy_tokens: Positive = Field(default=4, description="Tokens that a split block must share to be worth a copy.")

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _memory(cls, value: object) -> str:
        text = str(value)  # hermes.toml may say 0.8 without quotes
        memory_bytes(text, free=0)
        return text

    @model_validator(mode="after")
    def _water(self) -> "ExecutorSettings":
        if self.low_water > self.high_water:
            raise ValueError(f"low_water {self.low_water:g} must not be above high_water {self.high_water:g}")
        return self

    @model_validator(mode="after")
    def _ports(self) -> "ExecutorSettings":
        if self.metrics_port == self.port != 0:
            raise ValueError(f"port and metrics_port are both {self.port}: give each its own")
        return self


def memory_bytes(text: str, free: int) -> int:
    """Bytes that a memory setting means: "4GiB" as it stands, "0.8" as that share of `free` bytes.

    Raises ValueError where the text is neither.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is not None:
        number, unit = float(match[1]), (match[2] or "").upper()
        if unit and 0 < number < _MAX_UNITS:
            return int(number * _MEMORY_UNITS[unit])
        if not unit and 0 < number <= 1:
            return int(number * free)
    raise ValueError('give a size with its unit, such as "4GiB", or a share from 0 to 1, such as "0.8"')


class _Value(NamedTuple):
    value: Any
    source: str
    """The flag, variable or line that set it, as the user would find it."""


def load(cls: type[S], argv: list[str] | None = None) -> S:
    """The settings of a service: flags over HERMES_<SERVICE>_* over the service's table in hermes.toml over defaults.

    argv: the arguments after the program's name; else the process's own.
    `--help` prints all settings and leaves the process with 0.

    Raises StartupError, one sentence, for a bad value, an unknown flag, or an unknown name in hermes.toml.
    """
    program, about = f"hermes-{cls.service}", (cls.__doc__ or "").partition("\n")[0]
    parser = _Parser(prog=program, usage=f"{program} [settings]", description=about, allow_abbrev=False)
    parser.formatter_class = _help_for(cls)
    parser.add_argument("--config", type=Path, metavar="FILE", help="File of settings. [env: HERMES_CONFIG]")
    arguments = sys.argv[1:] if argv is None else argv
    flags: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        cls,
        root_parser=parser,
        cli_parse_args=arguments,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        formatter_class=parser.formatter_class,
    )
    config = parser.parse_args(arguments).config
    values = _from_file(cls, config) | _from_environment(cls)
    values |= {
        name: _Value(value, f"--{name.replace('_', '-')}") for name, value in flags().items() if name != "config"
    }
    try:
        return cls(**{name: value.value for name, value in values.items()})
    except ValidationError as error:
        raise StartupError(_sentence(cls, error, values)) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (.+)", message)
        if unknown is not None:
            argument = unknown[1].split()[0].split("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            message = f"{argument} is not a setting{_near(argument, known)}"
        raise StartupError(f"{message}; `{self.prog} --help` lists all settings.")


def _help_for(cls: type[ServerSettings]) -> type[argparse.HelpFormatter]:
    class Help(argparse.HelpFormatter):
        """Adds the name of the environment variable, and leaves out defaults that say nothing."""

        def _get_help_string(self, action: argparse.Action) -> str:
            text = (action.help or "").replace(" (default: null)", "")
            return f"{text} [env: {_variable(cls, action.dest)}]" if action.dest in cls.model_fields else text

    return Help


def _from_file(cls: type[ServerSettings], flag: Path | None) -> dict[str, _Value]:
    chosen = flag or Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_FILE)
    try:
        tables = tomllib.loads(chosen.read_text())
    except FileNotFoundError:
        if flag is None and not os.environ.get(CONFIG_VARIABLE):
            return {}
        raise StartupError(
            f"The file of settings {chosen} does not exist; check --config or {CONFIG_VARIABLE}."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError(f"The file of settings {chosen} cannot be read: {error}.") from error
    services = (AssemblerSettings.service, ExecutorSettings.service)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise StartupError(
                f"{chosen} has {name} outside of its tables; settings stand in [assembler] or [executor]."
            )
        if name not in services:
            raise StartupError(
                f"{chosen} has a table [{name}], which nothing reads{_near(name, services)};"
                " settings stand in [assembler] or [executor]."
            )
    table = tables.get(cls.service, {})
    for name in table:
        if name not in cls.model_fields:
            raise StartupError(
                f"{chosen} sets {name} in [{cls.service}], which is no setting{_near(name, cls.model_fields)}."
            )
    return {name: _Value(value, f"{name} in [{cls.service}] of {chosen}") for name, value in table.items()}


def _from_environment(cls: type[ServerSettings]) -> dict[str, _Value]:
    names = {name.upper(): name for name in cls.model_fields}
    for variable in os.environ:
        unknown = variable.removeprefix(_prefix(cls))
        if unknown in (variable, *names) or variable in _OTHERS or _KUBERNETES.fullmatch(unknown):
            continue
        near = _near(unknown, names) or f"; `hermes-{cls.service} --help` lists all settings"
        raise StartupError(f"The environment variable {variable} is no setting of hermes-{cls.service}{near}.")
    values = EnvSettingsSource(cls, env_prefix=_prefix(cls), env_ignore_empty=True)()
    return {name: _Value(value, _variable(cls, name)) for name, value in values.items()}


def _prefix(cls: type[ServerSettings]) -> str:
    return f"HERMES_{cls.service.upper()}_"


def _variable(cls: type[ServerSettings], name: str) -> str:
    return _prefix(cls) + name.upper()


def _sentence(cls: type[ServerSettings], error: ValidationError, values: Mapping[str, _Value]) -> str:
    first, *others = error.errors()
    same = [first, *(other for other in others if other["loc"][:1] == first["loc"][:1])]
    reasons = [each["msg"].removeprefix("Value error, ") for each in same]
    reason = " or ".join(text[:1].lower() + text[1:] for text in reasons)
    if not first["loc"]:
        return f"The settings of hermes-{cls.service} do not fit together: {reason}."
    name = str(first["loc"][0])
    if name not in values:
        return f"The setting {name} is missing: {reason}."
    value, source = values[name]
    if name in ("port", "metrics_port") and str(value).startswith("tcp://"):
        reason = "Kubernetes set it for a Service of that name, so put enableServiceLinks: false into the pod"
    return f"{source}: {value!r} cannot be used: {reason}."


def _near(name: str, known: Iterable[str]) -> str:
    candidates = list(known)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8) or [
        candidate for candidate in candidates if _is_slip(name, candidate)
    ]
    return f" (did you mean {matches[0]}?)" if matches else ""


def _is_slip(name: str, known: str) -> bool:
    """One wrong letter, or the right ones in another order: too little alike for difflib in a short name."""
    wrong = sum(map(operator.ne, name, known))
    return len(name) == len(known) and (wrong == 1 or sorted(name) == sorted(known))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
