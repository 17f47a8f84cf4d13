"""Waiting for the core's jobs from several threads.

`Core.drain` hands every ended job to whoever calls it, so one thread calls it and completes the futures of the others. A
future completes only after the core has stopped copying, also when the job failed: until then the memory is in use, and
whoever gave it away must not free it. How long that takes at most is the core's to keep (`load_ms`, `save_ms`).
"""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvasir._core import Core

POLL_MS = 500
"""How long the thread waits before it looks whether it was closed. Jobs wake it at once."""


class Done(NamedTuple):
    """What became of a job."""

    ok: bool
    """Whether every block was copied."""
    here: bytes
    """One byte a block: 1 if this block was copied (load), or is stored (save)."""
    copied_bytes: int
    error: str | None


class Jobs:
    """Starts jobs of one core and completes a future for each. All methods may be called from any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Done]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stopped = False

    def start(self, submit: Callable[[int], None]) -> Future[Done]:
        """Calls `submit` with a new job number and returns the job's future, which cannot be cancelled.

        Raises what `submit` raises, RuntimeError after `close` or where no thread can be started, and kvasir.Error if the
        core cannot report. A later call tries again.
        """
        future: Future[Done] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RuntimeError("the kvasir client is closed")
            # Not in the constructor: a process that forks after it would have no thread.
            if self._thread is None:
                self._thread = self._started()
            job = next(self._numbers)
            self._waiting[job] = future
        try:
            submit(job)
        except BaseException:
            with self._lock:
                self._waiting.pop(job, None)
            raise
        return future

    def close(self) -> None:
        """Closes the core, which stops copying, and completes what is left. May be called more than once."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._core.close()
        self._stopped = True
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _started(self) -> threading.Thread:
        # What can fail comes before there is a future that would wait for the thread.
        poll = select.poll()
        poll.register(self._core.event_fd(), select.POLLIN)
        thread = threading.Thread(target=self._work, args=(poll,), name="kvasir-jobs", daemon=True)
        thread.start()
        return thread

    def _work(self, poll: select.poll) -> None:
        error = "the kvasir client was closed"
        stopped = False
        while not stopped:
            poll.poll(POLL_MS)
            # Read before the drain, so that the last drain comes after the core has stopped copying.
            stopped = self._stopped
            try:
                self._complete()
            except Exception as failure:
                error = f"the kvasir client cannot report its jobs any more: {failure}"
                self._core.close()
                break
        with self._lock:
            left, self._waiting = self._waiting, {}
            self._closed = True
        for future in left.values():
            future.set_result(Done(False, b"", 0, error))

    def _complete(self) -> None:
        for job, ok, here, copied, error in self._core.drain():
            with self._lock:
                future = self._waiting.pop(job, None)
            if future is not None:
                future.set_result(Done(ok, here, copied, error))
