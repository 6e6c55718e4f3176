"""Where Hermes keeps files between runs."""

import os
from pathlib import Path

from shared.errors import StartupError


def cache_directory() -> Path:
    """The directory for prepared models and remembered digests.

    HERMES_CACHE, else XDG_CACHE_HOME/hermes, else ~/.cache/hermes. It need not exist yet.
    Raises StartupError where none of the three is known.
    """
    if chosen := os.environ.get("HERMES_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification tells to ignore a relative one
        return Path(base, "hermes")
    try:
        return Path.home() / ".cache" / "hermes"
    except RuntimeError as error:
        raise StartupError("There is no home directory for the cache: set HERMES_CACHE to a directory.") from error
