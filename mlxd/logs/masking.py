"""What libraries log of the URLs that they call, without what may be a secret in them."""

from __future__ import annotations

import logging
import re

#: Of the exporter of traces, the one part that calls a URL of the configuration.
_CALLERS = ("opentelemetry", "urllib3")
_USER = re.compile(r"(?<=//)[^\s/@]+(?=@)")
_QUERY = re.compile(r"(?<=\?)[^\s'\")]+")


class Masking(logging.Filter):
    """Rewrites their lines; those of others pass as they are."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always passes."""
        if record.name.partition(".")[0] in _CALLERS:
            text = _USER.sub("***", record.getMessage())
            record.msg, record.args = _QUERY.sub("***", text), None
            record.exc_info = None  # a traceback has the URL, too
        return True
