"""`python -m shared.supervisor up | down | logs | run | environment | next`."""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Final

from shared.errors import StartupError
from shared.output import abandon
from shared.supervisor import __doc__ as about
from shared.supervisor.children import run
from shared.supervisor.commands import down, environment, logs, next_steps, up
from shared.supervisor.output import complain
from shared.supervisor.rundir import DEFAULT_RUN_DIRECTORY, RUN_DIRECTORY_VARIABLE, RunDirectory
from shared.supervisor.services import services_of

_WAIT_SECONDS: Final = 300.0  # for health: loading a model from a cold disk takes minutes


def main() -> int:
    """The command line. Returns 0 when all went well, 1 when it did not, 2 for a setting that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m shared.supervisor", description=about)
    parser.add_argument("command", choices=["up", "down", "logs", "run", "environment", "next"])
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(os.environ.get(RUN_DIRECTORY_VARIABLE) or DEFAULT_RUN_DIRECTORY),
        help=f"where lock, state and logs are (.run) [env: {RUN_DIRECTORY_VARIABLE}]",
    )
    parser.add_argument("--assembler", default="", metavar="ARGS", help='the assembler\'s flags, as in "--port 6001"')
    parser.add_argument("--executor", default="", metavar="ARGS", help='the executor\'s flags, as in "--device cpu"')
    parser.add_argument("--wait", type=float, default=_WAIT_SECONDS, help="seconds that up and down wait at most (300)")
    parser.add_argument("--lines", type=int, default=50, help="lines of the log to begin with (50)")
    arguments = parser.parse_args()
    directory = RunDirectory(arguments.run_dir)
    try:
        match arguments.command:
            case "down":
                return down(directory, arguments.wait)
            case "logs":
                return logs(directory, arguments.lines)
            case "environment":
                return environment(directory)
            case "next":
                return next_steps(directory)
        services = services_of(shlex.split(arguments.assembler), shlex.split(arguments.executor))
        if arguments.command == "run":
            return run(directory, services)
        flags = [
            f"--run-dir={directory.path}",
            f"--assembler={arguments.assembler}",
            f"--executor={arguments.executor}",
        ]
        return up(directory, services, [sys.executable, "-m", "shared.supervisor", "run", *flags], arguments.wait)
    except StartupError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:  # as in `make logs | head`: who reads has enough
        abandon()
        return 0 if arguments.command == "logs" else 1
    except OSError as error:
        abandon()
        complain(f"{error.filename or 'The output'} cannot be used: {error.strerror or error}.")
        return 1
    except KeyboardInterrupt:
        return 0 if arguments.command == "logs" else 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
