"""Sampling where the client sends none: the file, the model's own, then built-in values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from mlxd.config import SamplingSettings
from mlxd.serving import SamplingDefaults

#: Ours by the names of Hugging Face's generation_config.json.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def of_model(folder: Path) -> SamplingSettings:
    """What the model's generation_config.json says; values that cannot be are left out."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingSettings()
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        log.warning("the model's generation_config.json is not JSON", error=str(error))
        return SamplingSettings()
    return _usable(config) if isinstance(config, dict) else SamplingSettings()


def merge(*layers: SamplingSettings) -> SamplingDefaults:
    """The first layer that has a value gives it; the built-in values come last."""
    given: dict[str, Any] = {}
    for layer in reversed(layers):
        given |= layer.model_dump(exclude_none=True)
    return SamplingDefaults(**given)


def _usable(config: Mapping[str, object]) -> SamplingSettings:
    usable: dict[str, object] = {}
    for theirs, ours in _NAMES.items():
        value = config.get(theirs)
        if value is None:
            continue
        try:
            SamplingSettings.model_validate({ours: value})
        except ValidationError:
            log.warning("generation_config.json: a value that cannot be", key=theirs, value=value)
        else:
            usable[ours] = value
    return SamplingSettings.model_validate(usable)
