"""Logging: structlog in front, the standard library's handlers behind, one format for both."""

from __future__ import annotations

import logging
from typing import TextIO

import structlog
from structlog.typing import Processor

from mlxd.config import LogSettings

#: Added to every line, also to those of libraries that know only `logging`.
_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(settings: LogSettings, stream: TextIO) -> None:
    """Log to this stream from now on; called again, it changes format and level."""
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
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(settings, stream),
            ],
        )
    )
    # aiohttp logs each request that it cannot parse as an error with a traceback, which lets
    # any client fill the log; the middleware logs whatever reaches a handler.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())


def _renderers(settings: LogSettings, stream: TextIO) -> list[Processor]:
    console = stream.isatty() if settings.format == "auto" else settings.format == "console"
    if console:
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
