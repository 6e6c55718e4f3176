"""What transformers adds to Jinja for chat templates, but for the filters and clocks that limits apply to."""

from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; a prompt just has what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare body, because what a template sets inside is not seen outside.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """`dict` for templates: makes dictionaries, and is not the type itself, which is a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` without underscored attributes, which would lead to Python's insides."""

    # No named parameters, so that a template can give its namespace an attribute "self".
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, positional = args[0], args[1:]
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            TemplateNamespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        TemplateNamespace._check(name)  # the instance gives out what the template has stored, nothing else
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the underscored attribute {name!r}")


def raise_exception(message: str) -> NoReturn:
    """A template's way to refuse a conversation."""
    raise jinja2.TemplateError(message)
