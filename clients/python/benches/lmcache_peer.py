"""LMCache's server in a process of its own, and what makes vLLM use it: a peer for `vllm_cpu.py`."""

import os
import pathlib
import socket
import subprocess
import sys
import time

CHUNK = 256
"""Tokens, LMCache's default."""


class Server:
    """`lmcache server` on loopback, which keeps everything in its own memory. Ready when the constructor returns."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.rpc, http = _free_port(), _free_port()
        line = [
            *("--host", "127.0.0.1", "--port", self.rpc, "--http-host", "127.0.0.1", "--http-port", http),
            *("--l1-size-gb", 2, "--eviction-policy", "LRU", "--chunk-size", CHUNK, "--supported-transfer-mode", "auto"),
        ]
        log = folder / "lmcache.log"
        known = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *map(str, line)], stdout=out, stderr=out, env=known
            )
        while "server is running" not in log.read_text():
            assert self.process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.1)

    def transfer(self) -> dict:
        """vLLM's `--kv-transfer-config`. LMCache's in-process connector has none for a KV cache in host memory."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.rpc},
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
