"""What the halves of the connector tell each other. Pickled on every step, so blocks travel as byte strings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

HASH_BYTES = 32
"""Length of vLLM's block hashes: SHA-256."""


class Job(NamedTuple):
    """Blocks of one request in one group that are loaded or saved together."""

    number: int
    request: str
    group: int
    """Position in the connector's list of groups."""
    hashes: bytes
    """HASH_BYTES for each block."""
    blocks: bytes
    """vLLM's block numbers, u32 little endian."""


class Part(NamedTuple):
    """Blocks of a prompt that are handed over while this step computes them."""

    job: Job
    peer: str
    """The other engine's host, as this engine's host calls it."""
    transfer: bytes
    first: int
    """Position in the prompt of the part's first block."""


class Arrival(NamedTuple):
    """Blocks of a prompt that another engine hands over."""

    job: Job
    """Its hashes are those of the whole prompt; its blocks are those for the hashes from `first` on."""
    transfer: bytes
    first: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, on each step."""

    epoch: bytes = b""
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    """Numbers of arrivals that no request awaits any more."""
    idle: bool = False
    """No tokens are computed in this step, so a worker may wait a little for its jobs."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: what has ended since the last step."""

    saved: dict[int, int] = field(default_factory=dict)
    """Number of a save or a hand-over: workers that are done with it, well or not."""
    failed: set[str] = field(default_factory=set)
    """Requests of which a worker could not load everything."""
    missed: set[str] = field(default_factory=set)
    """Requests of which a worker did not get everything that another engine was to hand over."""
    broken: set[int] = field(default_factory=set)
    """Numbers of hand-overs that have failed at a worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        saved = dict(self.saved)
        for number, workers in other.saved.items():
            saved[number] = saved.get(number, 0) + workers
        return WorkerReport(saved, self.failed | other.failed, self.missed | other.missed, self.broken | other.broken)


@dataclass
class Namespaces(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once: the digests under which it keeps blocks, one for each group."""

    digests: list[bytes]
    uneven: str = ""
    """Why the layers of this worker's blocks cannot be handed over one by one; empty where they can."""


def in_epoch(digest: bytes, epoch: bytes) -> bytes:
    """A namespace's digest after a reset of the cache; the digest itself before the first one."""
    return hashlib.sha256(digest + epoch).digest() if epoch else digest
