"""`python -m mlxd.engine --fd N`: started by the daemon, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys

from mlxd.engine.main import run

parser = argparse.ArgumentParser(prog="mlxd.engine")
parser.add_argument("--fd", type=int, required=True, help="inherited socket to the daemon")
# A crash in native code, and the watchdog's SIGABRT, say where it was.
faulthandler.enable()
# Ctrl-C reaches the whole foreground group; the daemon decides when engines end.
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(run(parser.parse_args().fd))
