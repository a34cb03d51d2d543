"""The one thread of the daemon that touches MLX, through mlx-lm.

MLX keeps thread-local objects whose destructors take the interpreter's lock. A
thread that ends while the interpreter does so aborts the whole process (seen on
about every fourth exit). This one never ends: it waits, until the process is gone.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class MlxThread:
    """Calls functions one at a time, in the order given. The thread starts with the first."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the thread; cancelling the future skips it while it waits."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
                self._thread.start()
                # A call that still runs when the interpreter goes would end with it.
                atexit.register(self._settle)
        return future

    def _settle(self) -> None:
        self.submit(lambda: None).result()

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                future.set_exception(error)
            else:
                future.set_result(result)
            # Else the last call would be kept alive while there is no next.
            del future, function
