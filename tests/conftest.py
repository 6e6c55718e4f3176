"""What all tests share."""

from pathlib import Path

import pytest

from shared import models
from shared.settings import DEFAULT_MODEL


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model, converted once on this machine."""
    return models.prepare(DEFAULT_MODEL, print)
