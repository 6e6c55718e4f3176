"""Starts an assembler: `hermes-assembler`, or `python -m assembler`."""

import sys
from typing import Final

from shared import extras, server
from shared.server import Application
from shared.settings import AssemblerSettings

_PACKAGES: Final = ("fastokens", "jinja2", "tokenizers")


def main(argv: list[str] | None = None) -> int:
    """Runs the assembler until it is told to stop. Returns the exit code."""
    return server.main(AssemblerSettings, _build, argv)


def _build(settings: AssemblerSettings) -> Application:
    extras.require("assembler", *_PACKAGES)
    from assembler.application import AssemblerApplication  # noqa: PLC0415 -- only now are its packages known to be there

    return AssemblerApplication(settings)


if __name__ == "__main__":
    sys.exit(main())
