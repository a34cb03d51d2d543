"""Where log lines go and how they look."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from mlxd.config import LogSettings
from mlxd.config.settings import MIN_LOG_SIZE
from mlxd.logs import configure
from mlxd.logs.repetition import TROUBLE


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Puts the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_of_ours_and_of_libraries_look_the_same():
    """One object a line, with level, time and logger, also from plain `logging`."""
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)

    structlog.get_logger("ours").info("hello", model="tiny")
    logging.getLogger("theirs").warning("bad %s", "thing")

    ours, theirs = map(json.loads, stream.getvalue().splitlines())
    assert (ours["event"], ours["model"], ours["level"], ours["logger"]) == (
        "hello",
        "tiny",
        "info",
        "ours",
    )
    assert (theirs["event"], theirs["level"], theirs["logger"]) == (
        "bad thing",
        "warning",
        "theirs",
    )
    assert set(theirs) == {"event", "level", "logger", "timestamp"}


def test_level_changes_for_loggers_that_exist():
    """A reload is heard by modules that made their logger long ago."""
    stream = io.StringIO()
    configure(LogSettings(format="json", level="error"), stream)
    log = structlog.get_logger("ours")
    log.info("unheard")
    configure(LogSettings(format="json", level="debug"), stream)
    log.debug("heard")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["heard"]


def test_tracebacks_stay_on_one_json_line():
    """A machine reads lines."""
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    try:
        int("on purpose")
    except ValueError:
        structlog.get_logger("ours").exception("failed")

    (line,) = stream.getvalue().splitlines()
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_auto_is_json_where_nobody_watches():
    """A pipe or a file gets JSON, a terminal gets a console's lines."""
    stream = io.StringIO()
    configure(LogSettings(), stream)
    structlog.get_logger("ours").info("hello")
    assert json.loads(stream.getvalue())["event"] == "hello"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    configure(LogSettings(), terminal)
    structlog.get_logger("ours").info("hello")
    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_a_line_that_repeats_is_bounded():
    """Through the real set-up; another model's line is another line."""
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    log = structlog.get_logger("ours")
    for _ in range(100):
        log.warning("step failed", model="a")
    log.warning("step failed", model="b")

    models = [json.loads(line)["model"] for line in stream.getvalue().splitlines()]
    assert models == ["a"] * int(TROUBLE.burst) + ["b"]


class TestFile:
    """`log.file`."""

    def settings(self, folder: Path, **more: Any) -> LogSettings:
        return LogSettings(file=str(folder / "log" / "mlxd.log"), **more)

    def test_a_file_takes_the_streams_place(self, tmp_path: Path):
        """In JSON, and its folder is made."""
        stream = io.StringIO()
        configure(self.settings(tmp_path), stream)
        structlog.get_logger("ours").info("hello")

        assert stream.getvalue() == ""
        line = (tmp_path / "log" / "mlxd.log").read_text()
        assert json.loads(line)["event"] == "hello"

    def test_a_file_that_is_full_is_followed_by_another(self, tmp_path: Path):
        """`keep` old ones stay, none larger than `max_size`, and the newest lines are there."""
        configure(self.settings(tmp_path, max_size=MIN_LOG_SIZE, keep=2), io.StringIO())
        log = structlog.get_logger("mlxd.request")
        for number in range(2000):
            log.info("request", number=number, filler="x" * 200)

        files = sorted(path.name for path in (tmp_path / "log").iterdir())
        assert files == ["mlxd.log", "mlxd.log.1", "mlxd.log.2"]
        assert all(path.stat().st_size <= MIN_LOG_SIZE for path in (tmp_path / "log").iterdir())
        newest = (tmp_path / "log" / "mlxd.log").read_text().splitlines()[-1]
        assert json.loads(newest)["number"] == 1999

    def test_a_file_that_was_moved_away_is_made_anew_by_a_reload(self, tmp_path: Path):
        """For whoever rotates logs with a tool of their own."""
        file = tmp_path / "log" / "mlxd.log"
        configure(self.settings(tmp_path), io.StringIO())
        file.rename(tmp_path / "old")
        configure(self.settings(tmp_path), io.StringIO())
        structlog.get_logger("ours").info("hello")

        assert json.loads(file.read_text())["event"] == "hello"

    def test_a_file_that_cannot_be_had_changes_nothing(self, tmp_path: Path):
        """Lines go on to where they went."""
        stream = io.StringIO()
        configure(LogSettings(format="json"), stream)
        (tmp_path / "log").touch()  # where a folder is needed
        with pytest.raises(OSError, match="log"):
            configure(self.settings(tmp_path), io.StringIO())
        structlog.get_logger("ours").info("hello")

        assert json.loads(stream.getvalue())["event"] == "hello"
