"""The command line of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.bench import command
from mlxd.bench.catalogue import SCENARIOS, STARTUP


def test_without_options_everything_runs_three_times() -> None:
    """Both servers, all scenarios and the start, medians of three, printed as a table."""
    options = command.parse([])
    assert list(options.scenarios) == [*SCENARIOS, STARTUP]
    assert list(options.servers) == ["mlxd", "mlx_lm.server"]
    assert (options.runs, options.requests, options.output) == (3, 5, "table")


def test_scenarios_can_be_chosen() -> None:
    """The option may be repeated; the order is always the same."""
    options = command.parse(["--scenario", "single", "--scenario", "mixed", "--json"])
    assert list(options.scenarios) == ["mixed", "single"]
    assert options.output == "json"


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--scenario", "unknown"], ["--runs", "0"], ["--requests", "1"], ["--runs", "x"]),
        ["--json", "--markdown"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With what would be right, and the status of wrong usage."""
    with pytest.raises(SystemExit, match="2"):
        command.parse(arguments)
    assert "usage: mlxd bench" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the exit status says so."""
    assert command.main(["--model", str(tmp_path / "nothing")]) == command.EXIT_FAILED
    assert "could not be fetched" in capsys.readouterr().err.replace("\n", " ")
