"""Runs the real daemon on fake engines: `python launch.py CONFIG`."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxd.daemon import Parts, run
from mlxd.errors import ConfigError
from tests.daemon.light import ENGINE_COMMAND, QUICK_RESTARTS, QUICK_WATCH, load_byte_tokenizer

if __name__ == "__main__":
    try:
        sys.exit(
            run(
                Path(sys.argv[1]),
                Parts(ENGINE_COMMAND, load_byte_tokenizer, QUICK_RESTARTS, QUICK_WATCH),
            )
        )
    except ConfigError as error:
        sys.exit(str(error))
