"""A real host: `kvasir serve` in a process of its own."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]


def binary() -> str:
    """``KVASIR_BIN``, or what the workspace has built."""
    built = [os.environ.get("KVASIR_BIN"), ROOT / "target/debug/kvasir", shutil.which("kvasir")]
    for path in built:
        if path and os.access(path, os.X_OK):
            return str(path)
    pytest.fail("no daemon: build the workspace, or set KVASIR_BIN")


class Host:
    """A daemon in a folder of its own; its sockets stay the same when it is started again."""

    def __init__(self, folder: pathlib.Path, *settings: str) -> None:
        self.folder = folder
        self.settings = settings
        self.process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, object] = {}
        self.start()

    def start(self) -> None:
        settings = [
            f"node.data_dir={self.folder}",
            "store.pool_bytes=16MiB",
            "listen.http=127.0.0.1:0",
            "listen.data=127.0.0.1:0",
            *self.settings,
        ]
        command = [binary(), "serve", "--json"]
        for setting in settings:
            command += ["--set", setting]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the host did not start: {self.process.wait()}"
        self.addresses = json.loads(line)

    @property
    def unix(self) -> str:
        return f"unix:{self.folder / 'kvasir.sock'}"

    @property
    def tcp(self) -> str:
        return f"tcp://{self.addresses['data']}"

    def token(self, role: str = "engine") -> str:
        """A token for TCP."""
        command = [binary(), "token", "new", "--role", role, "--set", f"node.data_dir={self.folder}"]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        return made.stdout.strip().splitlines()[-1]

    def stop(self, how: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        """Says nothing any more, and takes no bytes."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        # It stops a thread at a time.
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            time.sleep(0.001)
