"""Starts an assembler: `hermes-assembler`, or `python -m assembler`."""

import functools
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from assembler.worker import work
from shared import extras, logs, server, workers
from shared.metrics import PROCESSES_VARIABLE, Endpoint, of_processes, process_ended
from shared.settings import AssemblerSettings

_PACKAGES: Final = ("diskcache", "fastokens", "jinja2", "tokenizers")

log: Final = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs the assembler until it is told to stop. Returns the exit code."""
    return server.main(AssemblerSettings, _serve, argv)


def _serve(settings: AssemblerSettings) -> int:
    extras.require("assembler", *_PACKAGES)
    return _serve_alone(settings) if settings.workers == 1 else _serve_together(settings)


def _serve_alone(settings: AssemblerSettings) -> int:
    from assembler.application import AssemblerApplication  # noqa: PLC0415 -- only now are its packages known to be there

    return server.run(AssemblerApplication(settings), settings)


def _serve_together(settings: AssemblerSettings) -> int:
    """This process only keeps the port and the metrics; it never loads a tokenizer."""
    logs.configure(settings.log_level, settings.log_format, settings.service)
    with tempfile.TemporaryDirectory(prefix="hermes-assembler-") as directory:
        os.environ[PROCESSES_VARIABLE] = directory  # the workers' counts go there
        processes = Path(directory)
        endpoint = Endpoint(of_processes(processes), settings.host, settings.metrics_port)
        log.info("metrics on http://%s:%d/metrics", settings.host, endpoint.port)
        try:
            return workers.run(
                workers.Plan(settings.service, settings.host, settings.port, settings.workers, settings.drain_seconds),
                functools.partial(work, settings, processes),
                on_end=functools.partial(process_ended, processes),
            )
        finally:
            endpoint.close()


if __name__ == "__main__":
    sys.exit(main())
