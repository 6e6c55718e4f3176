"""Where settings come from: flags, environment, hermes.toml and defaults, in that order."""

import argparse
import difflib
import operator
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, EnvSettingsSource

from shared.errors import StartupError
from shared.settings import AssemblerSettings, ExecutorSettings, ServerSettings

CONFIG_FILE: Final = "hermes.toml"
CONFIG_VARIABLE: Final = "HERMES_CONFIG"

_OTHERS: Final = frozenset({"HERMES_EXECUTOR_ADDRESS"})  # the command line's, under the same prefix
# Kubernetes adds variables under the same prefix for a Service of that name, or of one that begins so.
_KUBERNETES: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

S = TypeVar("S", bound="ServerSettings")


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
