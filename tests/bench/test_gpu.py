"""The GPU benchmark runs on any machine, and its figures are of what it says."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.contenders import Pass
from benchmarks.shapes import SHAPES, build


def test_a_small_run_prints_a_line_for_each_cell_and_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both contenders at every width and kind of sampling, then rows that come and go."""
    options = "--shape tiny --rows 1 4 --context 16 --steps 2 --runs 2 --join --join-context 32"
    assert gpu.main(options.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line for line in lines if "| mlxd |" in line or "| mlx-lm |" in line]
    compared = [line.split("|")[1:5] for line in cells if line.count("|") == 11]
    assert compared == [
        [f" {kind} ", f" {rows} ", " 16 ", f" {name} "]
        for kind in gpu.SAMPLINGS
        for rows in (1, 4)
        for name in ("mlxd", "mlx-lm")
    ]
    events = [line.split("|")[1:3] for line in cells if line.count("|") == 5]
    assert [" join within a rung ", " mlxd "] in events
    assert [" leave ", " mlx-lm "] in events


def test_a_cell_is_the_median_of_its_runs() -> None:
    """One slow run of three changes nothing."""
    passes = [Pass(0.0, 0.0, [seconds] * 4) for seconds in (0.1, 9.0, 0.2)]
    assert gpu.Cell("mlxd", "greedy", 8, 512, passes).rate == pytest.approx(8 / 0.2)


def test_a_step_reads_its_weights_but_not_the_table_of_embeddings() -> None:
    """Nothing but lines of it, unless it is the head as well; and all rows' keys and values."""
    built = build(SHAPES["tiny"])
    table = 1000 * 64 * 4
    assert built.weight_bytes == built.loaded.weight_bytes - table
    assert built.column_bytes == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32
    assert built.step_bytes(3, 5) == built.weight_bytes + 15 * built.column_bytes


def test_rows_ask_for_different_settings_and_the_same_ones_every_time() -> None:
    """Both contenders get the same work."""
    first = [gpu.sampling("mixed", row) for row in range(8)]
    assert len({settings.top_k for settings in first}) > 1
    assert first == [gpu.sampling("mixed", row) for row in range(8)]
    assert all(gpu.sampling("mixed-open", row).top_k == 0 for row in range(8))
