"""The child process that fetches: `python -m mlxd.models SOURCE --cache DIR`.

Progress goes to standard error; the last line of standard output is the model's folder.
Fetching and converting block, print and import half the world: no work for the daemon itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mlxd.models import SourceError, fetch, parse


def main(arguments: list[str] | None = None) -> int:
    """Fetch one model. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mlxd.models", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--cache", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        # Progress bars in a log are one endless line. Both are read when tqdm is first imported.
        os.environ.update(TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    try:
        folder = fetch(parse(chosen.source), chosen.cache, _report)
    except (SourceError, ValueError, OSError) as error:
        _report(f"error: {error}")
        return 1
    print(folder)  # noqa: T201 - the answer to the parent
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress for people


if __name__ == "__main__":
    sys.exit(main())
