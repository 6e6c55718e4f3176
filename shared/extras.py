"""The optional packages of a service: told before the work begins where they are not installed."""

from importlib.util import find_spec

from shared.errors import StartupError


def require(extra: str, *modules: str) -> None:
    """Raises StartupError, with the command that installs the extra, where one of its modules is not there.

    Imports none of them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise StartupError(
            f"The package of {missing[0]} is not installed: run `pip install 'hermes-serving[{extra}]'`."
        )
