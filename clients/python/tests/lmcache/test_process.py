"""LMCache's server as a process, driven by LMCache's own load generator, with a second server after the first."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.v1", reason="LMCache is not installed: see clients/python/tests/lmcache/install.sh")

from lmcache_parts import plugin, until

REQUESTS, CHUNKS = 3, 4
SHAPE = "(2,256,16,4,64):bfloat16:4"
"""K and V, 256 blocks of 16 tokens, 4 heads of 64 numbers, 4 layers."""

ENVIRONMENT = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """`lmcache server` on loopback, with our client as its second level."""

    def __init__(self, log: Path, adapter: dict[str, Any]) -> None:
        self.log = log
        self.rpc, self.http = free_port(), free_port()
        line = [
            *("--host", "127.0.0.1", "--port", self.rpc, "--http-host", "127.0.0.1", "--http-port", self.http),
            *("--l1-size-gb", 0.125, "--eviction-policy", "LRU", "--chunk-size", 256),
            *("--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(adapter)),
        ]
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *map(str, line)], stdout=out, stderr=out, env=ENVIRONMENT
            )

    def wait(self) -> None:
        """Waits until it can be used."""
        until(lambda: "server is running" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.log.read_text()

    def prefetched(self) -> list[tuple[int, int]]:
        """Chunks of each prefetch: (found in the server's memory, loaded from the second level)."""
        return [(int(own), int(ours)) for own, ours in re.findall(r"\((\d+) L1, (\d+) L2\)", self.text())]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def start(shared_host: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def make() -> Server:
        adapter = plugin(shared_host.endpoint, model_id=request.node.nodeid)
        made.append(Server(tmp_path / f"server-{len(made)}.log", adapter))
        # It is in the list by now, so that one that does not start is ended as well.
        made[-1].wait()
        return made[-1]

    yield make
    for server in made:
        server.stop()


def drive(server: Server) -> list[str]:
    """Sends requests, each twice, and returns digests of the KV caches that were sent and that came back."""
    line = [
        *("--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{server.rpc}", "--url", f"http://127.0.0.1:{server.http}"),
        *("--num-tokens", CHUNKS * 256, "--kvcache-shape-spec", SHAPE, "--start", 0, "--end", REQUESTS, "--interval", 0),
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "bench", "server", *map(str, line)],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.findall(r"CHECKSUM: ([0-9a-f]{16})", ran.stdout + ran.stderr)


def all_stored(server: Server) -> bool:
    """Whether the server, which stores in the background, has nothing left to store."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/status") as answer:
        storing = json.load(answer)["storage_manager"]["store_controllers"]["_default"]
    return storing["pending_keys_count"] == storing["in_flight_task_count"] == 0


def test_a_second_server_serves_what_the_first_stored(start: Callable[[], Server]) -> None:
    first = start()
    digests = drive(first)
    # Of each request what was sent, and what came back into zeroed memory.
    assert len(digests) == 2 * REQUESTS and digests[::2] == digests[1::2]
    until(lambda: all_stored(first))
    first.stop()
    second = start()
    # The second server knows all from the beginning, so nothing is sent to it.
    assert drive(second) == digests[::2]
    assert second.prefetched() == [(0, CHUNKS)] * 2 * REQUESTS
