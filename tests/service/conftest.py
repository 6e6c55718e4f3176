"""What the services' processes share."""

from collections.abc import Iterator

import pytest

from tests.service.services import ServiceProcess, assembler_process, executor_process


@pytest.fixture(scope="session", autouse=True)
def own_assembly_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Assemblers keep prompts here, and not where this machine's user does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HERMES_ASSEMBLER_CACHE_DIRECTORY", str(tmp_path_factory.mktemp("assembly")))
        yield


@pytest.fixture(scope="module")
def executor(model_directory) -> Iterator[ServiceProcess]:
    """A real one, for the pair; other files have their own."""
    process = executor_process(model_directory)
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def assembler(model_directory, executor) -> Iterator[ServiceProcess]:
    """A real one beside it."""
    process = assembler_process(model_directory, executor)
    yield process
    assert process.stop() == 0
