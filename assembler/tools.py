"""Functions that a model may call, and the calls that it made, as a caller sends them."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hermes.v1 import types_pb2
from shared.errors import HermesError, invalid_argument

# Templates build marks from names (`<parameter=city>`), so a name is letters, digits, and what joins words in names.
_NAME: Final = re.compile(r"[\w.:/$@-]+")
# Enough to recognise a name by.
_QUOTED_CHARACTERS: Final = 60
# JSON nests, but none that a model can use nests deeper; Python goes down about a thousand calls in all.
_MOST_LEVELS: Final = 64
# Parsing holds the interpreter's lock for the whole text: 5 to 15 ms for so many.
_MOST_VALUES: Final = 50_000


@dataclass(frozen=True, slots=True)
class Tool:
    """function: the function's description, keys in the caller's order. characters: how long its JSON was."""

    function: Mapping[str, Any]
    characters: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """text: the arguments as they were written. arguments: the same as a mapping, None where that is no JSON object."""

    name: str
    text: str
    arguments: Mapping[str, Any] | None
    id: str | None = None


def read_tools(tools: Iterable[types_pb2.Tool]) -> tuple[Tool, ...]:
    """Raises HermesError BAD_TOOL, with the tool's place, for what is no description of a function."""
    return tuple(_tool(place, tool.function_json) for place, tool in enumerate(tools))


def read_call(call: types_pb2.ToolCall, message_index: int) -> ToolCall:
    """Raises HermesError BAD_TOOL_CALL, with the message's index, for a name that is none."""
    if not _NAME.fullmatch(call.name):
        raise invalid_argument(
            "BAD_TOOL_CALL",
            f"Message {message_index} calls {call.name[:_QUOTED_CHARACTERS]!r}: a tool's name has letters, digits and "
            "_ - . : / $ @ alone.",
            message_index=str(message_index),
        )
    return ToolCall(
        name=call.name,
        text=call.arguments_json,
        arguments=_arguments(call.arguments_json),
        id=call.id if call.HasField("id") else None,
    )


def is_name(name: str) -> bool:
    """Whether a tool or a parameter may be called so."""
    return _NAME.fullmatch(name) is not None


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object whose strings are text and whose numbers are numbers. Raises ValueError with what is wrong."""
    if text.count(",") >= _MOST_VALUES:  # commas in its strings count as well
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:  # half a surrogate pair can be escaped, but never be text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no character") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - the caller's text is wrong, not our type
    if text.count("[") + text.count("{") > _MOST_LEVELS:  # else it cannot be deeper
        _check_levels(value)
    return value


def _check_levels(value: dict[str, Any]) -> None:
    """Raises ValueError for more levels of lists and objects than there may be."""
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP: Final = f"it has more than {_MOST_LEVELS} levels"


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:_QUOTED_CHARACTERS]} is too large a number")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _tool(place: int, text: str) -> Tool:
    try:
        function = parse_object(text)
    except ValueError as error:
        raise _bad_tool(place, f"cannot be read: {error}") from error
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad_tool(place, "needs a name of letters, digits and _ - . : / $ @ alone")
    bad = _bad_parameter(function.get("parameters"))
    if bad is not None:
        raise _bad_tool(place, bad)
    return Tool(function, len(text))


def _bad_parameter(schema: Any) -> str | None:
    """What is wrong with a parameter's name anywhere in a JSON schema."""
    if isinstance(schema, list):
        return next(filter(None, (_bad_parameter(each) for each in schema)), None)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        for name in properties:
            if not _NAME.fullmatch(name):
                shown = name[:_QUOTED_CHARACTERS]
                return f"has the parameter {shown!r}: its name may have letters, digits and _ - . : / $ @ alone"
    return next(filter(None, (_bad_parameter(each) for each in schema.values())), None)


def _bad_tool(place: int, what: str) -> HermesError:
    return invalid_argument("BAD_TOOL", f"Tool {place} {what}.", tool_index=str(place))


def _arguments(text: str) -> Mapping[str, Any] | None:
    try:
        return parse_object(text)
    except ValueError:  # a model wrote it, and not always JSON
        return None
