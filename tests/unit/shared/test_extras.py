import sys

import pytest

from shared import extras
from shared.errors import StartupError


def test_what_is_installed_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    extras.require("executor", "json", "this")
    assert "this" not in sys.modules


def test_what_is_missing_is_told_with_the_command_that_installs_it():
    with pytest.raises(StartupError, match=r"of no_such is not .* `pip install 'hermes-serving\[executor\]'`\.$"):
        extras.require("executor", "json", "no_such", "nor_this")
