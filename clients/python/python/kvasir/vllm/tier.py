"""`KvasirTier`: a Kvasir host below vLLM's own tier in host memory.

vLLM's OffloadingConnector copies between GPU and host memory and knows about hybrid models; here chunks only move between
that host memory and Kvasir. Everything runs in the scheduler's process and nothing waits: lookups are gathered over a step
and answered by a thread, transfers are jobs.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.version import __version_tuple__

from kvasir import namespace
from kvasir.vllm.messages import HASH_BYTES, in_epoch
from kvasir.vllm.settings import Settings, nameless_model

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = init_logger("vllm.kvasir.tier")

_KEY_BYTES = HASH_BYTES + 4
_OF_THE_CONNECTOR = ("save_share", "save_decode", "allow_fail")


class KvasirTier(SecondaryTierManager):
    """Chunks of vLLM's host memory tier in a Kvasir host.

    Settings are those of `kvasir.vllm.settings.Settings`, written into the tier's entry of "secondary_tiers". Raises
    ValueError for those that cannot be right; later faults of the host are misses and failed jobs.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if foreign := sorted(set(config) & set(_OF_THE_CONNECTOR)):
            raise ValueError(f"the settings {foreign} are KvasirConnector's; a tier has no use for them")
        self.locality = Locality(locality) if locality is not None else None
        settings = Settings.parse(config)
        self.core = settings.core()
        self._runs, self._chunks = _chunk_run(primary_kv_view)
        self._fields = [
            _namespace(offloading_spec.config, settings, index, self.block_size_bytes)
            for index in range(len(offloading_spec.config.groups))
        ]
        self._digests = [namespace.digest(fields) for fields in self._fields]
        for fields, digest in zip(self._fields, self._digests, strict=True):
            logger.info("kvasir namespace %s: %s", digest.hex(), namespace.canonical(fields).decode())
        self._epoch = b""
        self._plans: list[int] = []
        self._make_plans()
        self._next = 0
        self._parts: dict[int, _Part] = {}
        self._finished: list[JobResult] = []
        self._active: set[str] = set()
        self._before_reset: set[str] = set()
        self._poll = select.poll()
        self._poll.register(self.core.event_fd(), select.POLLIN)
        self._lookups = _Lookups(self)

    def _make_plans(self) -> None:
        view = self._primary_kv_view
        self._plans = [self.core.plan(digest, self._runs, self._chunks, view) for digest in self.digests()]

    def digests(self) -> list[bytes]:
        """The namespace of each group in this epoch."""
        return [in_epoch(digest, self._epoch) for digest in self._digests]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._active.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._active.discard(req_context.req_id)
        self._before_reset.discard(req_context.req_id)
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._before_reset:
            # Its KV may be that of other weights.
            self._finished.append(JobResult(job_metadata.job_id, success=False))
            return
        self._submit(job_metadata, self.core.save)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self.core.load)

    def _submit(self, metadata: TransferJob, start: Any) -> None:
        keys = list(metadata.keys)
        transfer = _Transfer(metadata.job_id, metadata.is_promotion, keys)
        by_group: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            if self._known(key):
                by_group.setdefault(get_offload_group_idx(key), []).append(at)
        chunks = np.asarray(metadata.chunk_ids, "<u4")
        transfer.parts = len(by_group)
        if not by_group:
            self._finished.append(transfer.result(self.block_size_bytes))
        for group, places in by_group.items():
            self._next += 1
            self._parts[self._next] = _Part(transfer, places)
            hashes = b"".join(get_offload_block_hash(keys[at]) for at in places)
            try:
                start(self._next, self._plans[group], hashes, HASH_BYTES, chunks[places].tobytes())
            except Exception as error:
                logger.warning("kvasir could not start a transfer of %d chunks: %s", len(places), error)
                self._end(self._next, b"")

    def _known(self, key: OffloadKey) -> bool:
        """Whether a key is a SHA-256 of a group: other hashes may be shared by two prompts."""
        return len(key) == _KEY_BYTES and get_offload_group_idx(key) < len(self._digests)

    def _end(self, number: int, here: bytes) -> None:
        part = self._parts.pop(number, None)
        if part is None:
            return
        transfer = part.transfer
        if len(here) == len(part.places):
            transfer.good.update(transfer.keys[at] for at, one in zip(part.places, here, strict=True) if one)
        transfer.parts -= 1
        if transfer.parts == 0:
            if transfer.load:
                # Or the same lookup would promise the same chunk again, for ever.
                self._lookups.mark_miss([key for key in transfer.keys if key not in transfer.good])
            self._finished.append(transfer.result(self.block_size_bytes))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for number, _ok, here, _copied, error in self.core.drain():
            if error:
                logger.warning_once("kvasir: a transfer failed: %s", error)
            self._end(number, here)
        finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Waits for every job, and from then on uses other keys: vLLM asks for this when weights may change.

        A job ends by its deadline at the latest, or when its copying has stopped.
        """
        held: list[JobResult] = []
        while self._parts:
            held += self.get_finished_jobs()
            if self._parts:
                self._poll.poll(100)
        self._finished = held + self._finished
        self._before_reset = set(self._active)
        for plan in self._plans:
            self.core.unplan(plan)
        self._epoch = os.urandom(16)
        self._make_plans()

    def shutdown(self) -> None:
        """Ends the lookups and waits for what is being copied, as vLLM unmaps its memory after this."""
        self._lookups.shutdown()
        self.core.close()


@dataclass
class _Transfer:
    """One of vLLM's jobs; it has a part for each group that its keys are of."""

    number: int
    load: bool
    keys: list[OffloadKey]
    parts: int = 0
    good: set[OffloadKey] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)

    def result(self, chunk_bytes: int) -> JobResult:
        good = [key for key in self.keys if key in self.good]
        success = len(good) == len(self.keys)
        return JobResult(
            job_id=self.number,
            success=success,
            successful_keys=tuple(good) if self.load and good and not success else None,
            transfer_time=time.monotonic() - self.since,
            transfer_bytes=len(good) * chunk_bytes,
        )


@dataclass
class _Part:
    transfer: _Transfer
    places: list[int]


class _Lookups(AsyncLookupManager):
    """vLLM's own bookkeeping of lookups; a step's keys are one question to the host, asked by a thread."""

    def __init__(self, tier: KvasirTier) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Only where an answer is there to be changed: one that is still to come is newer than the failure, and vLLM's
        bookkeeping ends the engine if it arrives at a key that is settled."""
        self.drain_results()
        states = self._lookup_state
        super().mark_miss([key for key in keys if key in states and states[key].phase is LookupPhase.RESOLVED])

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Collection[bool]:
        found = [False] * len(keys)
        by_group: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            if self._tier._known(key):
                by_group.setdefault(get_offload_group_idx(key), []).append(at)
        digests = self._tier.digests()
        for group, places in by_group.items():
            hashes = b"".join(get_offload_block_hash(keys[at]) for at in places)
            for at, there in zip(places, self._tier.core.exists(digests[group], hashes, HASH_BYTES), strict=True):
                found[at] = bool(there)
        return found


def _chunk_run(view: memoryview) -> tuple[bytes, int]:
    """The plan of vLLM's host memory: one run a chunk, and how many chunks."""
    if view.shape is None or view.ndim != 2 or view.readonly or not view.c_contiguous or view.itemsize != 1:
        raise ValueError(
            f"vLLM's host memory is a view of {view.ndim} dimensions and items of {view.itemsize} bytes; "
            "kvasir knows rows of bytes, one a chunk"
        )
    # The array must not outlive this line: vLLM releases the view, which it cannot while it is exported.
    address = ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
    chunks, size = view.shape[0], view.shape[1]
    return struct.pack("<3Q", address, size, size), chunks


def _namespace(config: Any, settings: Settings, index: int, chunk_bytes: int) -> dict[str, Any]:
    """Everything that a chunk of this group must agree in with one that it is replaced by.

    vLLM does not show a tier the model's configuration: what quantises or overrides it, or which adapters there are. So its
    name and version are the user's word.
    """
    group, parallel = config.groups[index], config.parallel
    if not settings.model_id:
        raise nameless_model(config.model.name, "the tier's settings")
    return {
        "schema": namespace.SCHEMA,
        "engine": "vllm",
        "engine_version": [int(part) for part in __version_tuple__[:2]],
        "tier": True,
        "model": {
            "id": settings.model_id,
            "weights_version": settings.weights_version,
            "adapters_version": settings.adapters_version,
        },
        "kv_dtype": config.model.dtype,
        "hash": {"bytes": HASH_BYTES, "tokens": config.cache.tokens_per_hash},
        "group": {
            "index": index,
            "count": len(config.groups),
            "tokens_per_block": group.tokens_per_block,
            "layers": list(group.layer_names),
        },
        "chunk": {
            "blocks": config.cache.blocks_per_chunk,
            "bytes": chunk_bytes,
            "layout": config.kv_cache_layout,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
        },
        "shard": {
            "tp_size": parallel.tp_size,
            "pp_size": parallel.pp_size,
            "pcp_size": parallel.pcp_size,
            "dcp_size": parallel.dcp_size,
        },
    }
