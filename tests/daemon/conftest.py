"""What tests of the daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.config import BatchSettings, ModelSettings
from tests.daemon.light import model_folder


@pytest.fixture
def model(tmp_path: Path) -> ModelSettings:
    """A model of width 2."""
    source = str(model_folder(tmp_path))
    return ModelSettings(source=source, batch=BatchSettings(width=2, queue=4))


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that is not there yet: what waits for it stays until it is."""
    return tmp_path / "gate"
