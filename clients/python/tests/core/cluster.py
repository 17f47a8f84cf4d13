"""Hosts that know each other, each a real daemon."""

import pathlib
import random
import re
import socket
import time
from collections.abc import Callable

import pytest
from daemon import Host


def metric(host: Host, name: str) -> float:
    """The sum of a metric's rows."""
    with socket.socket(socket.AF_UNIX) as page:
        page.connect(str(host.addresses["control"]))
        page.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = page.makefile("rb").read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)\s*$", text, re.MULTILINE))


def until(what: str, happens: Callable[[], bool]) -> None:
    """Asks until it happens. Whether is the question, not when."""
    for _ in range(6000):
        if happens():
            return
        time.sleep(0.02)
    pytest.fail(f"two minutes passed without: {what}")


def own_address() -> str:
    """Of this machine, and nobody else's: a free port of 127.0.0.1 may be taken by the time that it is used."""
    return "127." + ".".join(str(random.randint(1, 254)) for _ in range(3))


def pair(folder: pathlib.Path, start_host: Callable[..., Host], *settings: str) -> list[Host]:
    """``host-0`` and ``host-1``, each of which sees the other."""
    secret = folder / "secret"
    secret.write_text("what both hosts of this test know")
    secret.chmod(0o600)
    addresses = [f"{own_address()}:7070" for _ in range(2)]
    hosts = []
    for n, address in enumerate(addresses):
        peer = f'{{name = "host-{1 - n}", address = "{addresses[1 - n]}", rack = "rack-{1 - n}"}}'
        hosts.append(
            start_host(
                f"node.name=host-{n}",
                f"cluster.secret_file={secret}",
                f"cluster.rack=rack-{n}",
                f"cluster.listen={address}",
                f"cluster.peers=[{peer}]",
                *settings,
            )
        )
    meet(hosts)
    return hosts


def meet(hosts: list[Host]) -> None:
    until("both are up", lambda: all(metric(host, "kvasir_peer_up") == 1 for host in hosts))
