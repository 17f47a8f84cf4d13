"""A real host for every test."""

import pathlib
from collections.abc import Callable, Iterator

import pytest
from daemon import Host


@pytest.fixture
def start_host(tmp_path: pathlib.Path) -> Iterator[Callable[..., Host]]:
    """Starts hosts with further settings, in folders of their own."""
    hosts: list[Host] = []

    def start(*settings: str) -> Host:
        folder = tmp_path / f"host-{len(hosts)}"
        folder.mkdir()
        hosts.append(Host(folder, *settings))
        return hosts[-1]

    yield start
    for host in hosts:
        host.stop()


@pytest.fixture
def host(start_host: Callable[..., Host]) -> Host:
    return start_host()
