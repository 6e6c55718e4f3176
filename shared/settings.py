"""What each service can be told: one class of settings each."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.addresses import check_target

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"

_MIB: Final = 1024**2
_MOST_BYTES: Final = 2**50  # a pebibyte; more is a slip
_LEAST_DISK: Final = 16 * _MIB  # below that the database's own log would be most of it
_MAX_MESSAGE: Final = 2**31 - 1  # gRPC keeps message sizes in 32 signed bits
_MEMORY_UNITS: Final = {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MAX_UNITS: Final = 2**40  # more than any machine has of any unit, and still a number of bytes
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", re.IGNORECASE)

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
CpuLinear = Literal["auto", "dense", "fp16"]
CpuAttention = Literal["auto", "native", "torch"]


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
    insight: bool = Field(
        default=True, description="Tell callers and operators what keeps the caches from hitting their prompts."
    )
    log_prompts: Literal["off", "head_tail"] = Field(
        default="off", description="Log the first and last characters of each prompt, for debugging."
    )
    answer_reserve: Positive = Field(
        default=1024, description="Tokens of the context that chats are cut short for, where the caller asks for that."
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that serve the port together.")
    metrics_port: int = Field(
        default=9101, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 takes a free one."
    )
    cache: bool = Field(default=True, description="Keep assembled prompts for later requests.")
    cache_memory_bytes: ByteSize = Field(
        default=ByteSize(64 * _MIB), ge=0, le=_MOST_BYTES, description="Memory for them in each process."
    )
    cache_disk_bytes: ByteSize = Field(
        default=ByteSize(1024 * _MIB),
        ge=0,
        le=_MOST_BYTES,
        description='Disk for them, of all processes together, at least "16MiB"; 0 keeps them in memory alone.',
    )
    cache_directory: Path | None = Field(
        default=None, description="Directory for them, of this user alone; else assembly in the cache directory."
    )
    cache_age_seconds: float = Field(default=7 * 86_400.0, gt=0, description="Time for which they are kept.")

    @field_validator("executor")
    @classmethod
    def _target(cls, value: str) -> str:
        check_target(value)
        return value

    @field_validator("cache_disk_bytes")
    @classmethod
    def _room(cls, value: ByteSize) -> ByteSize:
        if 0 < value < _LEAST_DISK:
            raise ValueError('give at least "16MiB", or 0 to keep prompts in memory alone')
        return value

    @model_validator(mode="after")
    def _ports(self) -> "AssemblerSettings":
        _check_ports(self.port, self.metrics_port)
        return self


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
    cpu_linear: CpuLinear = Field(
        default="auto",
        description="Linears on a CPU: dense is exact, fp16 rounds their weights; auto is fp16 where faster and safe.",
    )
    cpu_attention: CpuAttention = Field(
        default="auto",
        description="Attention on a CPU: a kernel compiled here, or torch; auto is native where it can be.",
    )
    kv_memory: str = Field(
        default="1GiB",
        description='Memory for keys and values: "4GiB", or "0.8" for a share of what is free on the GPU.',
    )
    block_size: Literal["auto"] | Positive = Field(default="auto", description="Tokens in a block of keys and values.")
    max_batch_tokens: Positive = Field(default=512, description="Tokens that one step may process.")
    max_stall: float = Field(
        default=2.0, gt=1, description="Times as long as without it that a step may take for a prompt beside answers."
    )
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
        _check_ports(self.port, self.metrics_port)
        return self


def _check_ports(port: int, metrics_port: int) -> None:
    if metrics_port == port != 0:
        raise ValueError(f"port and metrics_port are both {port}: give each its own")


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
