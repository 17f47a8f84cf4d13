"""A Kvasir host in a process of its own, that a test can stop, kill and damage."""

import mmap
import os
import pathlib
import signal
import subprocess


def binary() -> str | None:
    """The host's program: KVASIR_BIN, or what the workspace has built."""
    root = pathlib.Path(__file__).resolve().parents[4]
    named = os.environ.get("KVASIR_BIN")
    for path in [named] if named else [root / "target/release/kvasir", root / "target/debug/kvasir"]:
        if path and os.access(path, os.X_OK):
            return str(path)
    return None


class Host:
    """One host under a folder. Started again, it is another host at the same address: its memory is empty."""

    def __init__(self, folder: pathlib.Path, pool: str = "64MiB") -> None:
        self.folder, self.pool = folder, pool
        self.address = f"unix:{folder}/kvasir.sock"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> "Host":
        program = binary()
        assert program, "no kvasir program; build it, or set KVASIR_BIN"
        settings = {
            "node.data_dir": f"{self.folder}/data",
            "node.socket": f"{self.folder}/kvasir.sock",
            "node.control": f"{self.folder}/control.sock",
            "listen.http": "127.0.0.1:0",
            "store.pool_bytes": self.pool,
            # Damage is to be found by the reader here, not by the host's own patrol.
            "store.scrub_rate": "0B",
        }
        given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with open(self.folder / "host.log", "a") as log:
            self.process = subprocess.Popen(
                [program, "serve", "--json", *given], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the host did not start: {(self.folder / 'host.log').read_text()[-2000:]}"
        return self

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pause(self) -> None:
        """From now on the host answers nothing, as one that hangs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the host without a chance to say goodbye."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    def damage(self, piece: bytes) -> int:
        """Turns the sign of every f32 in every copy of `piece` in the host's memory. Returns how many copies there were."""
        assert self.process is not None
        found = 0
        for entry in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                if "memfd:" not in os.readlink(entry):
                    continue
                with open(entry, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    at = memory.find(piece)
                    while at >= 0:
                        memory[at : at + len(piece)] = bytes(
                            byte ^ 0x80 if place % 4 == 3 else byte for place, byte in enumerate(piece)
                        )
                        found += 1
                        at = memory.find(piece, at + len(piece))
            except (OSError, ValueError):
                continue
        return found
