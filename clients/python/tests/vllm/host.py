"""A Kvasir host in a process of its own, that a test can stop, kill and damage."""

import contextlib
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import time


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

    def __init__(self, folder: pathlib.Path, pool: str = "64MiB", cluster: dict[str, str] | None = None) -> None:
        self.folder, self.pool, self.cluster = folder, pool, cluster or {}
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
            **self.cluster,
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

    def metric(self, name: str) -> int:
        """The sum of a metric's rows."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(f"{self.folder}/control.sock")
            control.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            with control.makefile() as page:
                rows = page.read().splitlines()
        return sum(int(float(row.split()[-1])) for row in rows if row.startswith((name + " ", name + "{")))

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


def pair(folder: pathlib.Path, names: tuple[str, str] = ("prefill", "decode")) -> list[Host]:
    """Two hosts that know each other, as the documentation of hand-overs starts them."""
    secret = folder / "secret"
    secret.write_text("what both hosts of this test know")
    secret.chmod(0o600)
    ports = _free_ports(2)
    hosts = []
    for at, name in enumerate(names):
        (folder / name).mkdir()
        other = f'{{name = "{names[1 - at]}", address = "127.0.0.1:{ports[1 - at]}", rack = "{names[1 - at]}"}}'
        cluster = {
            "node.name": name,
            "cluster.rack": name,
            "cluster.secret_file": str(secret),
            "cluster.listen": f"127.0.0.1:{ports[at]}",
            "cluster.peers": f"[{other}]",
            # A busy machine does not make a call give up.
            "cluster.read_timeout": "60s",
            "tiering.load_timeout": "120s",
        }
        hosts.append(Host(folder / name, cluster=cluster))
    for host in hosts:
        host.start()
    meet(hosts)
    return hosts


def meet(hosts: list[Host]) -> None:
    """Waits until each host knows that the other one is up."""
    until = time.monotonic() + 120
    while not all(host.metric("kvasir_peer_up") == 1 for host in hosts):
        assert time.monotonic() < until, "the hosts do not meet"
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
