"""What the connectors to SGLang and LMCache share: settings, and futures of the core's jobs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvasir import Unavailable
from kvasir._connection import Connection
from kvasir._core import Core
from kvasir._jobs import Jobs

NAMESPACE = bytes(32)
WAIT_S = 300


def test_a_token_is_not_shown() -> None:
    settings = Connection.parse({"host": "unix:/x", "token": "secret"})
    assert settings.token == "secret" and "secret" not in repr(settings)
    with pytest.raises(ValueError, match=r"'token'.* is a list; it is a str") as refused:
        Connection.parse({"host": "unix:/x", "token": ["secret"]})
    assert "secret" not in str(refused.value)


class Silent:
    """A real core whose event descriptor cannot be had once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._failed = False

    def event_fd(self) -> int:
        if not self._failed:
            self._failed = True
            raise Unavailable("no descriptor")
        return self._core.event_fd()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def saved(jobs: Jobs, core: Core) -> bool:
    future = jobs.start(lambda job: core.save_from(job, NAMESPACE, [b"7" * 32], [b"some bytes"]))
    return future.result(WAIT_S).ok


def test_futures_end_after_a_thread_that_had_no_descriptor(shared_host: Any) -> None:
    core = Core(shared_host.endpoint, match_ms=5000)
    jobs = Jobs(Silent(core))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        saved(jobs, core)
    assert saved(jobs, core)
    jobs.close()


def test_futures_end_after_a_thread_that_did_not_start(shared_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(shared_host.endpoint, match_ms=5000)
    jobs = Jobs(core)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            saved(jobs, core)
    assert saved(jobs, core)
    jobs.close()


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
