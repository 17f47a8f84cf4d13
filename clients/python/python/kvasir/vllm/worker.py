"""The worker's half: copies blocks between vLLM's cache and the host, in the background.

Nothing here waits for the host, and nothing raises. A job is reported when the copying has stopped, never before: the
scheduler hands its blocks to somebody else after that.
"""

from __future__ import annotations

import logging
import select
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from kvasir import namespace
from kvasir.vllm.geometry import Frame, Pages, Shard, group_namespace, unsupported
from kvasir.vllm.layers import Layers, uneven
from kvasir.vllm.messages import HASH_BYTES, Arrival, Job, Namespaces, Part, StepMetadata, WorkerReport, in_epoch
from kvasir.vllm.settings import Settings
from kvasir.vllm.stats import KvasirStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvasir.worker")

IDLE_WAIT_MS = 5
"""How long an otherwise empty step waits for a job, so that an engine that only waits does not spin."""


@dataclass
class _Running:
    """A job that the core works on."""

    job: Job
    kind: str
    """"load" or "arrive", "save" or "hand_over": what its counters are called."""
    plan: int
    epoch: bytes


class WorkerHalf:
    """All state of a connector in a worker process."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, settings: Settings) -> None:
        self.config, self.kv, self.settings = config, kv, settings
        self.frame = Frame.of(config, kv)
        self.core: Any = None
        self.shard: Shard | None = None
        self.pages: list[Pages] = []
        self.layers: Layers | None = None
        self.fields: list[dict[str, Any]] = []
        self.digests: list[bytes] = []
        self.counts: Counter[str] = Counter()
        self._plans: dict[bytes, list[int]] = {}
        self._running: dict[int, _Running] = {}
        self._loading: dict[str, int] = {}
        self._ended: list[tuple[int, bool, bytes, int, str | None]] = []
        self._report = WorkerReport()
        self._arriving: set[str] = set()
        self._bad_requests: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._poll: Any = None

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Takes note of vLLM's cache. Where it cannot be used, the scheduler never hears of a namespace: no hits."""
        try:
            self._register(caches)
        except Exception as error:
            logger.warning("kvasir neither loads nor saves: %s", error)
            self.digests = []

    def _register(self, caches: dict[str, torch.Tensor]) -> None:
        if reason := unsupported(self.config, self.kv):
            raise ValueError(reason)
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self.shard = Shard.of(self.config, self.kv, get_tp_group().rank_in_group, get_pp_group().rank_in_group)
        for group in self.frame.groups:
            layers = self.kv.kv_cache_groups[group.index].layer_names
            pages = Pages(caches, layers, self.kv.num_blocks)
            fields = group_namespace(self.config, self.kv, self.settings, self.frame, group, pages, self.shard)
            self.pages.append(pages)
            self.fields.append(fields)
        if len(self.pages) == 1:
            self.layers = Layers(self.pages[0])
        self.core = self.settings.core()
        self._poll = select.poll()
        self._poll.register(self.core.event_fd(), select.POLLIN)
        self.digests = [namespace.digest(fields) for fields in self.fields]
        for fields, digest in zip(self.fields, self.digests, strict=True):
            logger.info("kvasir namespace %s: %s", digest.hex(), namespace.canonical(fields).decode())

    def handshake(self) -> Namespaces | None:
        """What the scheduler needs to ask for this worker's blocks; None if it has none."""
        return Namespaces(self.digests, uneven(self.pages)) if self.digests else None

    def start_parts(self, step: StepMetadata) -> None:
        """Begins the hand-overs of a step, before its layers are computed. They end like saves."""
        if self.layers is None:
            for part in step.parts:
                self._fail(part.job, "hand_over", step.epoch, "this worker's layers cannot be handed over one by one")
            return
        for part in step.parts:
            self._start(part.job, "hand_over", step.epoch, self._hand(part, len(self.layers)))
        self.layers.begin([part.job.number for part in step.parts])

    def _hand(self, part: Part, layers: int) -> Callable[[int], Any]:
        job, peer, transfer, first = part
        return lambda plan: self.core.hand_over(
            job.number, plan, peer, transfer, first, job.hashes, HASH_BYTES, job.blocks, layers
        )

    def layer_computed(self, layer: str) -> None:
        """A layer of this step is final, and goes to whom it is handed over to."""
        if self.layers is not None:
            self.layers.computed(self.core, layer)

    def start_loads(self, step: StepMetadata) -> None:
        """Starts the loads of a step. Each ends in exactly one report, also when it cannot be started."""
        for job in (*step.loads, *(arrival.job for arrival in step.arrivals)):
            self._loading[job.request] = self._loading.get(job.request, 0) + 1
        for job in step.loads:
            self._start(job, "load", step.epoch, self._copy("load", job))
        for arrival in step.arrivals:
            self._arriving.add(arrival.job.request)
            self._start(arrival.job, "arrive", step.epoch, self._await(arrival))
        for number in step.abandoned:
            self._abandon(number)

    def _await(self, arrival: Arrival) -> Callable[[int], Any]:
        """Waits for a prompt that another engine hands over. It ends like a load, `hand_over_ms` from now at the latest."""
        job, transfer, first = arrival
        layers, wait_ms = len(self.layers or ()), self.settings.hand_over_ms
        return lambda plan: self.core.arrive(
            job.number, plan, transfer, job.hashes, HASH_BYTES, first, job.blocks, layers, wait_ms
        )

    def _abandon(self, number: int) -> None:
        """Gives an arrival up that nobody awaits. It is reported when its copying has stopped, sooner than by itself."""
        try:
            self.core.abandon(number)
        except Exception as error:
            logger.warning("kvasir: a hand-over that nobody awaits ends only with its time: %s", error)

    def start_saves(self, step: StepMetadata) -> None:
        """Starts the saves of a step. The scheduler holds references to the blocks until all workers report."""
        if self.layers is not None:
            self.layers.finish(self.core)
        for job in step.saves:
            own = self._own_part(job)
            self._start(own, "save", step.epoch, self._copy("save", own))

    def drop_saves(self, step: StepMetadata) -> None:
        """Ends the saves and hand-overs of a step that has failed, as its blocks may never have been computed."""
        if self.layers is not None:
            self.layers.give_up(self.core)
        for job in step.saves:
            self._fail(job, "save", step.epoch, "the forward pass that was to compute the blocks has failed")

    def _copy(self, kind: str, job: Job) -> Callable[[int], Any]:
        pages = self.pages[job.group]
        return lambda plan: getattr(self.core, kind)(
            job.number, plan, job.hashes, HASH_BYTES, job.blocks, stream=pages.stream()
        )

    def _own_part(self, job: Job) -> Job:
        """Of ranks that hold the same bytes each writes every n-th block."""
        shard = self.shard
        if shard is None or shard.replicas == 1:
            return job
        mine = slice(shard.replica, None, shard.replicas)
        hashes = np.frombuffer(job.hashes, f"V{HASH_BYTES}")[mine].tobytes()
        return job._replace(hashes=hashes, blocks=np.frombuffer(job.blocks, "<u4")[mine].tobytes())

    def _start(self, job: Job, kind: str, epoch: bytes, start: Callable[[int], Any]) -> None:
        self._running[job.number] = _Running(job, kind, -1, epoch)
        if not job.blocks:
            self._ended.append((job.number, True, b"", 0, None))
            return
        try:
            plan = self._plan(epoch)[job.group]
            self._running[job.number].plan = plan
            start(plan)
        except Exception as error:
            self._end_failed(job, str(error))

    def _fail(self, job: Job, kind: str, epoch: bytes, why: str) -> None:
        """Reports a job that is not begun."""
        self._running[job.number] = _Running(job, kind, -1, epoch)
        self._end_failed(job, why)

    def _end_failed(self, job: Job, why: str) -> None:
        self._ended.append((job.number, False, bytes(len(job.blocks) // 4), 0, why))

    def _plan(self, epoch: bytes) -> list[int]:
        """The plans of an epoch, made when it is first met; those of earlier ones end with their last job."""
        if epoch not in self._plans:
            self._plans[epoch] = [
                self.core.plan(in_epoch(digest, epoch), pages.runs, pages.blocks, pages.tensors, device=pages.device)
                for digest, pages in zip(self.digests, self.pages, strict=True)
            ]
        if len(self._plans) > 1:
            self._drop_plans(epoch)
        return self._plans[epoch]

    def _drop_plans(self, current: bytes) -> None:
        used = {running.plan for running in self._running.values()}
        for epoch, plans in list(self._plans.items()):
            if epoch != current and used.isdisjoint(plans):
                for plan in self._plans.pop(epoch):
                    self.core.unplan(plan)

    def results(self, step: StepMetadata) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last step, and those of them of which something is missing."""
        if self.core is None:
            return set(), set()
        if step.idle and self._running and not self._ended:
            self._poll.poll(IDLE_WAIT_MS)
        ended, self._ended = self._ended, []
        try:
            ended += self.core.drain()
        except Exception as error:
            logger.warning("kvasir cannot tell which jobs have ended; will ask again: %s", error)
        finished: set[str] = set()
        failures: dict[str | None, int] = defaultdict(int)
        for number, ok, here, copied, failure in ended:
            running = self._running.pop(number, None)
            if running is None:
                continue
            if running.kind in ("load", "arrive"):
                self._loaded(running, ok, here, copied, step.epoch, finished)
            else:
                self._saved(running, ok, here, copied)
                if running.kind == "hand_over" and not ok:
                    self._report.broken.add(number)
            if not ok:
                failures[failure] += 1
        for failure, jobs in failures.items():
            # Blocks that are gone are an everyday matter, and counted.
            level = logging.WARNING if failure else logging.DEBUG
            why = failure or "blocks are not there any more"
            logger.log(level, "kvasir: %d jobs failed; the engine computes what is missing: %s", jobs, why)
        failed, self._bad_requests = self._bad_requests & finished, self._bad_requests - finished
        arrived, self._arriving = self._arriving & finished, self._arriving - finished
        self._report.failed |= failed - arrived
        self._report.missed |= failed & arrived
        for kind, requests in (("load", finished - arrived), ("arrive", arrived)):
            self.counts[f"{kind}_requests"] += len(requests)
            self.counts[f"{kind}_failed_requests"] += len(requests & failed)
        return finished, failed

    def _loaded(self, running: _Running, ok: bool, here: bytes, copied: int, epoch: bytes, finished: set[str]) -> None:
        job = running.job
        blocks = np.frombuffer(job.blocks, "<u4")
        whole = len(here) == len(blocks) and running.epoch == epoch
        good = np.frombuffer(here, np.uint8).astype(bool) if whole else np.zeros(len(blocks), bool)
        bad = blocks[~good]
        if len(bad) or not ok:
            # A job that failed as a whole and names no block is not believed about any of them.
            self._bad_blocks.update((bad if len(bad) else blocks).tolist())
            self._bad_requests.add(job.request)
        self.counts[f"{running.kind}_blocks"] += int(good.sum())
        self.counts[f"{running.kind}_failed_blocks"] += len(bad)
        self.counts[f"{running.kind}_bytes"] += copied
        self._loading[job.request] -= 1
        if self._loading[job.request] == 0:
            del self._loading[job.request]
            finished.add(job.request)

    def _saved(self, running: _Running, ok: bool, here: bytes, copied: int) -> None:
        saved = sum(1 for one in here if one)
        self.counts[f"{running.kind}_blocks"] += saved
        self.counts[f"{running.kind}_failed_blocks"] += len(running.job.blocks) // 4 - saved
        self.counts[f"{running.kind}_bytes"] += copied
        self._report.saved[running.job.number] = 1

    def bad_blocks(self) -> set[int]:
        """Blocks that could not be loaded. Where there are several groups, their numbers mean nothing to vLLM."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad if len(self.frame.groups) == 1 else set()

    def report(self) -> WorkerReport | None:
        """What the scheduler must know of this step."""
        report, self._report = self._report, WorkerReport()
        return report if report != WorkerReport() else None

    def stats(self) -> KvasirStats | None:
        self.counts = +self.counts
        return KvasirStats.of(self.counts)

    def shutdown(self) -> None:
        """Waits for what is being copied, as vLLM frees its cache after this."""
        if self.core is not None:
            self.core.close()
            self.core = None
