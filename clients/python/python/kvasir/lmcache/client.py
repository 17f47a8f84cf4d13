"""The client that LMCache's server drives: batches are submitted, and an event descriptor says when some have ended.

LMCache gives buffers and waits on `event_fd`. Loads and saves are the core's jobs. Questions and removals would block, so a
thread asks them; it signals through the core's own descriptor. Every batch is reported exactly once, also a refused one,
and a load only after the last byte was copied.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvasir.lmcache.settings import Refused, ServerSettings

logger = logging.getLogger(__name__)

QUESTIONS_AT_MOST = 4096
"""Batches that wait to be asked. Beyond it they are answered "not there" at once."""

KEY_BYTES = 32
"""LMCache's keys are texts of any length; the store's are their SHA-256."""

WARNINGS_AT_MOST = 16

Completion = tuple[int, bool, str, list[bool] | None]


class KvasirClient:
    """A client of LMCache's `native_plugin` adapter, built as `KvasirClient(**adapter_params)`.

    Raises ValueError for settings that cannot be right; a host that is away is not an error, as it may come back.
    """

    def __init__(self, **adapter_params: Any) -> None:
        self.settings = ServerSettings.of(adapter_params)
        self._namespace = self.settings.namespace(mode="server")
        self._core = self.settings.core()
        self._event_fd: int = self._core.event_fd()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        self._ended: deque[Completion] = deque()
        self._questions: queue.Queue[tuple[int, int, Callable[[], bytes]] | None] = queue.Queue(QUESTIONS_AT_MOST)
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()
        self._closed = False

    def event_fd(self) -> int:
        """A descriptor that is readable while completions wait. It belongs to this client."""
        return self._event_fd

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[Any]) -> int:
        """Loads the blocks of `keys` into `views`. A block of another size than its view is not loaded."""
        return self._copy(self._core.load_into, keys, views)

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[Any]) -> int:
        """Saves `views` under `keys`; ok if each is stored, by this batch or before."""
        return self._copy(self._core.save_from, keys, views)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which blocks are there."""
        digests = _digests(keys)
        return self._ask(keys, lambda: self._core.exists(self._namespace, b"".join(digests), KEY_BYTES))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes blocks; True for each that was there."""
        digests = _digests(keys)
        return self._ask(keys, lambda: self._core.remove(self._namespace, digests))

    def drain_completions(self) -> list[Completion]:
        """What has ended since the last call: (batch, ok, error, one bool a key). Makes `event_fd` unreadable."""
        # The core empties the descriptor first. What ends after that makes it readable again.
        completions: list[Completion] = []
        for number, ok, here, _, error in self._core.drain():
            with self._lock:
                keys = self._under_way.pop(number, 0)
            result = _bools(here, keys)
            completions.append((number, ok and all(result), error or "", result))
        while self._ended:
            completions.append(self._ended.popleft())
        return completions

    def counters(self) -> dict[str, int]:
        """The client's counters since it was made; see docs/engines/lmcache.md."""
        return dict(self._core.counters())

    def close(self) -> None:
        """Ends the connections. Loads and saves under way end first. May be called more than once."""
        with self._lock:
            closed, self._closed = self._closed, True
            thread = self._thread
        if closed:
            return
        self._questions.put(None)
        if thread is not None:
            thread.join()
        self._core.close()

    def _copy(self, start: Callable[..., None], keys: Sequence[str], views: Sequence[Any]) -> int:
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = len(keys)
        try:
            if not keys or len(keys) != len(views):
                raise ValueError(f"{len(keys)} keys and {len(views)} buffers")
            self._check(keys)
            start(number, self._namespace, _digests(keys), list(views))
        except Exception as failure:
            # LMCache does not expect an exception here; it would lose the batch and wait for it.
            with self._lock:
                self._under_way.pop(number, None)
            self._end(number, False, str(failure), [False] * len(keys))
        return number

    def _ask(self, keys: Sequence[str], question: Callable[[], bytes]) -> int:
        number = next(self._numbers)
        try:
            self._check(keys)
            with self._lock:
                if self._closed:
                    raise RuntimeError("the kvasir client is closed")
                # First, so that a question that nobody asks is not left in the queue.
                if self._thread is None:
                    thread = threading.Thread(target=self._answer, name="kvasir-questions", daemon=True)
                    thread.start()
                    self._thread = thread
                self._questions.put_nowait((number, len(keys), question))
        except (Refused, RuntimeError, queue.Full) as failure:
            self._end(number, False, str(failure) or "too many questions wait", [False] * len(keys))
        return number

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            number, keys, question = asked
            try:
                self._end(number, True, "", _bools(question() if keys else b"", keys))
            except Exception as failure:
                self._end(number, False, str(failure), [False] * keys)

    def _end(self, number: int, ok: bool, error: str, result: list[bool]) -> None:
        self._ended.append((number, ok, error, result))
        with self._lock:
            # The descriptor is the core's, and somebody else's after it was closed.
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)

    def _check(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                self.settings.check_key(key)
        except Refused as refused:
            if str(refused) not in self._warned and len(self._warned) < WARNINGS_AT_MOST:
                self._warned.add(str(refused))
                logger.error("kvasir stores nothing of this model: %s", refused)
            raise


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _bools(here: bytes, keys: int) -> list[bool]:
    return [bool(byte) for byte in here] if len(here) == keys else [False] * keys
