"""The `hermes` command."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from hermes.arguments import BAD_ARGUMENT
from hermes.cli import assemble, bench, cache, chat, explain, health, model
from hermes.cli.console import fail, speak_utf8, utf8_arguments
from shared import output
from shared.errors import HermesError, StartupError

app = typer.Typer(
    name="hermes",
    help="Talk to a chat model that Hermes serves, and look at what serves it. "
    "HERMES_ADDRESS and HERMES_EXECUTOR_ADDRESS say where the assembler and the executor are, "
    "HERMES_TLS_CA whom to trust; options win over them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(chat.chat)
app.command()(chat.generate)
app.command()(assemble.assemble)
app.command()(explain.explain)
app.command()(health.health)
app.add_typer(cache.app, name="cache")
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hermes {version('hermes-serving')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line. A failure is one sentence on standard error and exit code 1; wrong usage exits with 2."""
    speak_utf8()
    sys.argv[1:] = utf8_arguments(sys.argv[1:])
    try:
        app()
    except HermesError as error:
        fail(error.message, code=2 if error.reason == BAD_ARGUMENT else 1)
    except StartupError as error:
        fail(str(error), code=2)
    except OSError as error:
        output.abandon()
        fail(f"{error.filename or 'The output'} cannot be written: {error.strerror or error}.")
