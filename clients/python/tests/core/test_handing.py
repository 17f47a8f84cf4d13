"""Prompts from one engine to another, between two real hosts."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
from cluster import meet, metric, pair, until
from daemon import Host
from engine import LAYERS, NAMESPACE, RUN, Done, Memory, hash_of, hashes, numbers, wait

from kvasir._core import Core

BLOCKS = 8
SIZE = LAYERS * RUN
LONG = 120_000


class Engine:
    """A core next to a host, and its memory."""

    def __init__(self, host: Host, **options: int) -> None:
        self.core = Core(host.unix, **{"match_ms": 5000, "save_ms": 20_000, **options})  # type: ignore[arg-type]
        self.memory = Memory(BLOCKS)
        self.plan = self.memory.plan(self.core)

    def send(self, job: int, transfer: bytes, part: int, names: list[int]) -> None:
        """The block called ``n`` lies in block ``n``."""
        for n in names:
            self.memory.fill(n, n)
        self.core.hand_over(
            job, self.plan, "host-1", transfer, part, hashes(names), 32, numbers(names), LAYERS
        )

    def layers(self, job: int, *layers: int) -> None:
        for layer in layers:
            assert self.core.layer_ready(job, layer)

    def receive(self, job: int, transfer: bytes, names: list[int], first: int = 0, ms: int = LONG) -> None:
        """Block ``n`` belongs into the one that is as far from the end."""
        blocks = numbers(BLOCKS - 1 - n for n in names[first:])
        self.core.arrive(job, self.plan, transfer, hashes(names), 32, first, blocks, LAYERS, ms)

    def has(self, n: int) -> bool:
        return self.memory.has(BLOCKS - 1 - n, n)

    def has_layer(self, n: int, layer: int) -> bool:
        at = self.memory.at(BLOCKS - 1 - n, layer)
        return any(self.memory.bytes[at])


@pytest.fixture
def hosts(tmp_path: pathlib.Path, start_host: Callable[..., Host]) -> list[Host]:
    return pair(tmp_path, start_host)


@pytest.fixture
def engines(hosts: list[Host]) -> Iterator[list[Engine]]:
    both = [Engine(host) for host in hosts]
    yield both
    for engine in both:
        engine.core.close()


def good(done: Done, job: int, blocks: int) -> None:
    assert done == (job, True, b"\1" * blocks, blocks * SIZE, None)


def failed(done: Done, job: int, text: str = "") -> None:
    assert (done[0], done[1], set(done[2]), done[3]) == (job, False, {0}, 0) and text in (done[4] or ""), done


def no_places(hosts: list[Host]) -> bool:
    return all(metric(host, "kvasir_reservations") == 0 for host in hosts)


@pytest.mark.parametrize("receiver_first", [True, False])
def test_a_prompt_in_two_parts(hosts: list[Host], engines: list[Engine], receiver_first: bool) -> None:
    prefill, decode = engines
    if receiver_first:
        decode.receive(7, b"cmpl-1", [0, 1, 2], first=1)
    for part, names in [(0, [0, 1]), (2, [2])]:
        prefill.send(7, b"cmpl-1", part, names)
        prefill.layers(7, 1, 0, 2)
        good(wait(prefill.core)[0], 7, len(names))
    if not receiver_first:
        decode.receive(7, b"cmpl-1", [0, 1, 2], first=1)
    good(wait(decode.core)[0], 7, 2)
    assert not decode.has(0) and decode.has(1) and decode.has(2)
    assert not prefill.core.layer_ready(7, 0) and not prefill.core.abandon(7)
    until("nothing is left", lambda: all(metric(host, "kvasir_blocks") == 0 for host in hosts))
    assert no_places(hosts)
    sent, came = prefill.core.counters(), decode.core.counters()
    assert (sent["hand_over_jobs"], sent["hand_over_bytes"]) == (2, 3 * SIZE)
    assert (came["arrive_jobs"], came["arrive_blocks"], came["load_jobs"]) == (1, 2, 0)
    prefill.core.unplan(prefill.plan)
