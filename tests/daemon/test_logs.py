"""Where log lines go and how they look."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from mlxd.config import LogSettings
from mlxd.logs import configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Puts the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
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
