"""What a request is sampled with where its client says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd.config import SamplingSettings
from mlxd.host.defaults import merge, of_model
from mlxd.serving import SamplingDefaults


def write(folder: Path, text: str) -> Path:
    """A model folder with this generation_config.json."""
    (folder / "generation_config.json").write_text(text)
    return folder


def test_file_wins_over_model_and_model_over_built_in(tmp_path: Path):
    """First the configuration, then the model's own values, then ours."""
    own = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 100, "do_sample": True}
    folder = write(tmp_path, json.dumps(own))

    merged = merge(SamplingSettings(temperature=0.2), of_model(folder))

    assert merged == SamplingDefaults(
        temperature=0.2, top_p=0.9, top_k=0, min_p=0.0, max_tokens=100
    )


def test_model_without_a_generation_config_gets_built_in_values(tmp_path: Path):
    """Temperature 1, top_p 1, top_k 0, min_p 0, 512 tokens."""
    assert merge(SamplingSettings(), of_model(tmp_path)) == SamplingDefaults()


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"temperature": null}'])
def test_a_broken_generation_config_is_no_reason_to_fail(tmp_path: Path, text: str):
    """Its values are a courtesy; without them the built-in ones count."""
    assert of_model(write(tmp_path, text)) == SamplingSettings()


def test_values_that_cannot_be_are_left_out_alone(tmp_path: Path):
    """One bad value does not take the good ones with it."""
    folder = write(tmp_path, '{"temperature": -1, "top_p": "x", "top_k": 40}')

    assert of_model(folder) == SamplingSettings(top_k=40)
