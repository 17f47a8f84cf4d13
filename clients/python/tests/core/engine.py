"""What an engine does with the core: memory in layers, jobs, and waiting for them."""

import ctypes
import itertools
import select
import struct
from collections.abc import Iterable

from kvasir._core import Core

NAMESPACE = bytes(range(32))
RUN = 4096
LAYERS = 3

Done = tuple[int, bool, bytes, int, str | None]


def hash_of(n: int) -> bytes:
    return n.to_bytes(32, "little")


def hashes(numbers: Iterable[int]) -> bytes:
    return b"".join(hash_of(n) for n in numbers)


def numbers(blocks: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", block) for block in blocks)


def pattern(n: int, layer: int) -> bytes:
    """What belongs into a layer of block ``n``."""
    return bytes((n * 31 + layer * 7 + at) & 0xFF for at in range(64)) * (RUN // 64)


class Memory:
    """Each layer keeps all blocks one behind the other."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.bytes = bytearray(LAYERS * blocks * RUN)
        self.owner = (ctypes.c_ubyte * len(self.bytes)).from_buffer(self.bytes)
        base = ctypes.addressof(self.owner)
        runs = [(base + layer * blocks * RUN, RUN, RUN) for layer in range(LAYERS)]
        self.runs = b"".join(struct.pack("<QQQ", *run) for run in runs)

    def at(self, block: int, layer: int) -> slice:
        begin = (layer * self.blocks + block) * RUN
        return slice(begin, begin + RUN)

    def fill(self, block: int, n: int) -> None:
        for layer in range(LAYERS):
            self.bytes[self.at(block, layer)] = pattern(n, layer)

    def has(self, block: int, n: int) -> bool:
        return all(self.bytes[self.at(block, layer)] == pattern(n, layer) for layer in range(LAYERS))

    def plan(self, core: Core, namespace: bytes = NAMESPACE) -> int:
        return core.plan(namespace, self.runs, self.blocks, self.owner)


def wait(core: Core, count: int = 1) -> list[Done]:
    """Waits by the descriptor until as many jobs have ended; they are in the order of their numbers."""
    done: list[Done] = []
    while len(done) < count:
        ready, _, _ = select.select([core.event_fd()], [], [], 120)
        assert ready, f"{len(done)} of {count} jobs came"
        done += core.drain()
    assert len(done) == count
    return sorted(done, key=lambda job: job[0])


_job = itertools.count(1)


def save(core: Core, plan: int, names: Iterable[int], blocks: Iterable[int], stream: int = 0) -> Done:
    core.save(next(_job), plan, hashes(names), 32, numbers(blocks), stream=stream)
    return wait(core)[0]


def load(core: Core, plan: int, names: Iterable[int], blocks: Iterable[int], stream: int = 0) -> Done:
    core.load(next(_job), plan, hashes(names), 32, numbers(blocks), stream=stream)
    return wait(core)[0]
