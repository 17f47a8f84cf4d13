"""A real host for the tests: `kvasir serve` in a temporary folder, on Unix sockets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKSPACE = Path(__file__).parents[3]
POOL_BYTES = 128 << 20


def program() -> str | None:
    """The daemon: KVASIR_BIN, the workspace's own builds, or what is on the PATH."""
    built = [str(WORKSPACE / "target" / profile / "kvasir") for profile in ("release", "debug")]
    candidates = [os.environ.get("KVASIR_BIN", ""), *built, shutil.which("kvasir") or ""]
    return next((path for path in candidates if os.access(path, os.X_OK) and Path(path).is_file()), None)


class Host:
    """One daemon, which a test may kill and start again at the same place."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.socket = folder / "kvasir.sock"
        self._settings = {
            "node.name": "test",
            "node.data_dir": folder,
            "listen.http": "127.0.0.1:0",
            "store.pool_bytes": POOL_BYTES,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        """Starts the daemon and returns once it answers."""
        daemon = program()
        if daemon is None:
            pytest.skip("no kvasir daemon: build it, or name it in KVASIR_BIN")
        settings = [part for name, value in self._settings.items() for part in ("--set", f"{name}={value}")]
        with open(self.folder / "log", "a") as log:
            self._process = subprocess.Popen([daemon, "serve", "--json", *settings], stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        # It prints its addresses when it is ready, or ends.
        ready = self._process.stdout.readline()
        assert ready, f"the daemon did not start: {(self.folder / 'log').read_text()}"
        json.loads(ready)

    def hang(self) -> None:
        """Lets it say nothing more, with its connections open. Returns once it does not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # It stops a thread at a time, and until then the others answer.
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            time.sleep(0.001)

    def kill(self) -> None:
        """Ends the daemon without a farewell."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture(scope="session")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host that lives through all tests, for those that keep their keys apart."""
    host = Host(tmp_path_factory.mktemp("h"))
    host.start()
    yield host
    host.kill()


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A running host of its own for each test."""
    # Not tmp_path: a socket's path has 107 bytes at most, and pytest's folders carry the test's name.
    host = Host(tmp_path_factory.mktemp("h"))
    host.start()
    yield host
    host.kill()
