"""What the services' processes share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_assembly_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Assemblers keep prompts here, and not where this machine's user does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HERMES_ASSEMBLER_CACHE_DIRECTORY", str(tmp_path_factory.mktemp("assembly")))
        yield
