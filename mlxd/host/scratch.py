"""Private temporary folders of engines, kept between runs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """The first of `folder`/1, `folder`/2, … that no running engine has; made if it is not there.

    MLX keeps what it compiles in its temporary folder, under names that depend on the kernel
    only: of two engines that share one, the second loads what the first is still writing. A model
    has two while it is replaced. The next run finds what this one has compiled.

    Raises:
        OSError: the folder cannot be written.
    """
    for number in count(1):
        path = folder / str(number)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (path / ".lock").open("w") as file:
            try:
                # The kernel drops the lock with its holder, however that one ends.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield path
            return
