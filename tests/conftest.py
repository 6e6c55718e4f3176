"""What all tests share."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shared import models
from shared.settings import DEFAULT_MODEL

# How long an example takes depends on what else the machine does, which is nobody's fault.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model, converted once on this machine."""
    return models.prepare(DEFAULT_MODEL, print)
