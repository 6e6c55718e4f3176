from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from assembler import model_files
from assembler.model_files import ModelFiles


@pytest.fixture(scope="session")
def files(model_directory: Path) -> ModelFiles:
    return model_files.load(model_directory)


@pytest.fixture(scope="session")
def reference(model_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_directory)
