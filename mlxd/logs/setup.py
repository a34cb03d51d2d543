"""Logging: structlog in front, the standard library's handlers behind, one format for both."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import TextIO

import structlog
from structlog.typing import Processor

from mlxd.config import LogSettings
from mlxd.logs.masking import Masking
from mlxd.logs.repetition import Repetition

#: Added to every line, also to those of libraries that know only `logging`.
_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(settings: LogSettings, stream: TextIO) -> None:
    """Log from now on to the file of the settings, else to this stream.

    Called again, it changes all of that; a file that was moved away is made anew.

    Raises:
        OSError: the file cannot be had; nothing has changed.
    """
    handler = _handler(settings, stream)
    handler.addFilter(Masking())
    handler.addFilter(Repetition())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(settings, stream),
            ],
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    # aiohttp logs each request that it cannot parse as an error with a traceback, which lets
    # any client fill the log; the middleware logs whatever reaches a handler.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    root = logging.getLogger()
    old, root.handlers = root.handlers, [handler]
    root.setLevel(settings.level.upper())
    for replaced in old:
        if isinstance(replaced, logging.FileHandler):  # streams are not ours to close
            replaced.close()


def _handler(settings: LogSettings, stream: TextIO) -> logging.Handler:
    if settings.file is None:
        return logging.StreamHandler(stream)
    Path(settings.file).parent.mkdir(parents=True, exist_ok=True)
    return logging.handlers.RotatingFileHandler(
        settings.file, maxBytes=settings.max_size, backupCount=settings.keep, encoding="utf-8"
    )


def _renderers(settings: LogSettings, stream: TextIO) -> list[Processor]:
    watched = settings.file is None and stream.isatty()
    console = watched if settings.format == "auto" else settings.format == "console"
    if console:
        return [structlog.dev.ConsoleRenderer(colors=watched)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
