"""The scheduler's half: which blocks the host has, and which jobs the workers start.

It runs in the engine's loop. It waits for nothing but answers of the host: `match_ms` at most for those to the match of each
group of blocks, once more for each group that is loaded, when the host is asked to keep its blocks, and once for the tiers
that a hit comes from; and, where KV events are published, for those to `Events`. It never delays the
freeing of a request's blocks: a save takes references of its own, and drops them when every worker is done.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from kvasir.vllm.events import Events
from kvasir.vllm.geometry import Frame, Group, unsupported
from kvasir.vllm.handing import Handing
from kvasir.vllm.messages import (
    HASH_BYTES,
    Arrival,
    Job,
    Namespaces,
    Part,
    StepMetadata,
    WorkerReport,
    in_epoch,
)
from kvasir.vllm.settings import Settings
from kvasir.vllm.sources import UNKNOWN, sources
from kvasir.vllm.stats import KvasirStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvasir.scheduler")

MEMO_SECONDS = 1.0
"""How long an answer to a match is repeated. A request that waits for memory is asked for at every step."""

RETRY_SECONDS = 1.0
"""How long a request whose load has brought nothing may ask for another one, before it is computed."""

FREES_SECONDS = 0.1
"""How long the scheduler may wait for a save to give its blocks back before it preempts a request instead."""


@dataclass
class _Match:
    """What the host said of a request."""

    hashes: int
    last: bytes
    boot: int
    until: float
    tokens: int
    """Leading tokens that the host holds under every worker's namespace."""


@dataclass
class _Tracked:
    """A request from its first match to its end."""

    request: Request
    match: _Match | None = None
    computed: int = 0
    """Tokens that vLLM had itself at the last match: what is loaded begins there."""
    saved: int = 0
    """Tokens up to which blocks are with the host, or on their way."""
    arrives: bool = False
    """What the last match found is handed over by another engine."""
    refused: bool = False
    """A load has failed. The request is computed, as the same load would fail again, for ever."""
    aside: bool = False
    """It was not answered at its last match, for the sake of those behind it."""
    retries_until: float = 0.0
    """After this it is computed; 0: its load, if it had one, is not known to have brought nothing."""
    old: bool = False
    """Its KV was computed before a reset of the cache, and is not saved under the keys after it."""


@dataclass
class _Hold:
    """Blocks that a save or a hand-over refers to."""

    blocks: list[int]
    workers: int
    handed: bool
    since: float = field(default_factory=time.monotonic)


class SchedulerHalf:
    """All state of a connector in the engine's process."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, settings: Settings) -> None:
        self.settings = settings
        self.frame = Frame.of(config, kv)
        self.off = unsupported(config, kv)
        self.core = settings.core()
        self.counts: Counter[str] = Counter()
        self.handing = Handing(config, kv, self.frame, settings, self.counts)
        self.events = Events.of(config, kv, self.frame, self.core)
        self.epoch = b""
        self._ranks = {
            (pp, tp)
            for pp in range(config.parallel_config.pipeline_parallel_size)
            for tp in range(config.parallel_config.tensor_parallel_size)
        }
        self._workers = config.parallel_config.world_size
        self._digests: list[list[bytes]] = []
        self._namespaces: list[list[bytes]] = []
        self._pool: BlockPool | None = None
        self._holds_max = max(1, int(kv.num_blocks * settings.save_share))
        self._holds: dict[int, _Hold] = {}
        self._held = 0
        self._tracked: dict[str, _Tracked] = {}
        self._loading: set[str] = set()
        self._unclean = False
        """vLLM kept KV over the last reset, which no key tells from KV of after it."""
        self._loads: list[Job] = []
        self._arrivals: list[Arrival] = []
        self._next_job = 0
        self._warned = 0.0
        if self.off:
            logger.warning("kvasir neither loads nor saves: %s", self.off)

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def meet(self, ranks: dict[tuple[int, int], Any]) -> None:
        """Learns under which namespaces the workers keep blocks. With a rank missing there are no hits and no saves."""
        said = {rank: meta for rank, meta in ranks.items() if isinstance(meta, Namespaces)}
        groups = len(self.frame.groups)
        if set(said) != self._ranks or any(len(meta.digests) != groups for meta in said.values()):
            missing = sorted(self._ranks - set(said))
            logger.warning("kvasir neither loads nor saves: no namespaces from the ranks (pp, tp) %s", missing)
            return
        # Ranks that hold the same bytes have one namespace; each is asked for once.
        self._digests = [
            list(dict.fromkeys(said[rank].digests[group] for rank in sorted(said))) for group in range(groups)
        ]
        self.handing.meet(meta.uneven for meta in said.values())
        self._rename()

    def _rename(self) -> None:
        self._namespaces = [[in_epoch(digest, self.epoch) for digest in group] for group in self._digests]

    @property
    def ready(self) -> bool:
        """Whether blocks can be asked for at all."""
        return bool(self._namespaces) and self._pool is not None and not self.off and not self._unclean

    # Loads

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be loaded, and whether any can. Asked at every step a request waits.

        None: vLLM is to ask again in its next step, and to look at the requests behind this one in this step.
        """
        if not self.ready:
            return 0, False
        tracked = self._track(request)
        if request.request_id in self._loading:
            self._limit_retries(tracked)
        if self._steps_aside(tracked):
            return None, False
        # A request is matched when vLLM holds nothing of it but cached blocks, of which a clean reset leaves none.
        tracked.computed, tracked.old, tracked.arrives = computed, False, False
        if tracked.refused or not request.block_hashes:
            return 0, False
        if (awaited := self.handing.awaited(request)) > computed:
            # What arrives is saved here as if it had been computed here.
            tracked.saved, tracked.arrives = max(tracked.saved, computed), True
            return awaited - computed, True
        found = self._found(tracked)
        tracked.saved = max(tracked.saved, found) if found >= 0 else max(tracked.saved, computed)
        external = max(0, found - computed)
        return external, external > 0

    def _limit_retries(self, tracked: _Tracked) -> None:
        """Has a request computed whose load brought nothing, and that is not let in to load again.

        vLLM keeps what it needs reserved since its first load, also from its own next one: where that is half of all blocks, for
        one request or for several, none of them would ever be let in. What is computed needs no reservation.
        """
        now = time.monotonic()
        tracked.retries_until = tracked.retries_until or now + RETRY_SECONDS
        tracked.refused |= now > tracked.retries_until

    def _steps_aside(self, tracked: _Tracked) -> bool:
        """Whether the requests behind this one come first, at every other step.

        One whose load has brought nothing has lost its blocks and stands before others that still have theirs. vLLM looks
        at none of them while it has no blocks for the first, also where their loads have ended: all would wait for ever.
        """
        if tracked.request.request_id not in self._loading or len(self._loading) == 1:
            return False
        tracked.aside = not tracked.aside
        return tracked.aside

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _found(self, tracked: _Tracked) -> int:
        """Leading tokens of the request that the host holds; -1 where it cannot be asked."""
        hashes, match, now = tracked.request.block_hashes, tracked.match, time.monotonic()
        if (
            match is not None
            and match.hashes == len(hashes)
            and match.last == hashes[-1]
            and match.boot == self.core.boot()
            and now < match.until
        ):
            self.counts["match_remembered"] += 1
            return match.tokens
        tokens = self._ask(hashes)
        tracked.match = _Match(len(hashes), hashes[-1], self.core.boot(), now + MEMO_SECONDS, tokens)
        return tokens

    def _ask(self, hashes: Sequence[bytes]) -> int:
        self.counts["match_queries"] += 1
        tokens = len(hashes) * self.frame.hash_tokens
        try:
            for group, namespaces in zip(self.frame.groups, self._namespaces, strict=True):
                wanted = b"".join(self._of_group(group, hashes, 0, tokens))
                if not wanted:
                    return 0
                blocks = self.core.prefix(namespaces, wanted, HASH_BYTES)
                tokens = min(tokens, blocks * group.block_tokens)
        except Exception as error:
            self.counts["match_unavailable"] += 1
            self._warn("the host cannot be asked, and nothing is loaded: %s", error)
            return -1
        return tokens - tokens % self.frame.align_tokens

    @staticmethod
    def _of_group(group: Group, hashes: Sequence[bytes], start: int, end: int) -> Sequence[bytes]:
        """The hashes by which a group's blocks in the tokens [start, end) are known."""
        each, first, last = group.hashes_per_block, start // group.block_tokens, end // group.block_tokens
        return hashes[first * each + each - 1 : last * each : each]

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has blocks for the request, of which `external` tokens must be loaded."""
        self._loading.discard(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if not external or tracked is None or not self.ready:
            self.handing.settle(request)
            return
        self._loading.add(request.request_id)
        tracked.retries_until = 0.0
        if self.handing.awaited(request) > tracked.computed:
            self._await(tracked, blocks, external)
            return
        self.handing.settle(request)
        self.counts["hit_tokens"] += external
        start, end = tracked.computed, tracked.computed + external
        table = blocks.get_block_ids()
        for position, group in enumerate(self.frame.groups):
            ids = table[group.index][start // group.block_tokens : end // group.block_tokens]
            hashes = self._of_group(group, request.block_hashes, start, end)
            if job := self._job(request.request_id, position, hashes, ids):
                self._loads.append(job)
                self._hold_at_host(position, job)

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """From which tiers these tokens are loaded, which vLLM asks when it has allocated blocks for them."""
        tracked = self._tracked.get(request.request_id)
        if not tokens or tracked is None or tracked.arrives or not self.ready:
            # What arrives is no hit of this host, which does not have it yet.
            return {UNKNOWN: tokens} if tokens else {}
        group, start = self.frame.groups[0], tracked.computed
        hashes = self._of_group(group, request.block_hashes, start, start + tokens)
        return sources(self.core, self._namespaces[0][0], hashes, group.block_tokens, tokens)

    def _await(self, tracked: _Tracked, blocks: KVCacheBlocks, external: int) -> None:
        """Has the workers wait for a prompt that another engine hands over, beyond what vLLM has of it."""
        request, group = tracked.request, self.frame.groups[0]
        self.counts["arrive_tokens"] += external
        end = tracked.computed + external
        first, last = tracked.computed // group.block_tokens, end // group.block_tokens
        hashes = self._of_group(group, request.block_hashes, 0, end)
        job = self._numbered(request.request_id, 0, hashes, blocks.get_block_ids()[group.index][first:last])
        self._arrivals.append(Arrival(job, self.handing.take(request, job.number), first))

    def _hold_at_host(self, position: int, job: Job) -> None:
        """Asks the host to keep what was promised until it is loaded. Without it, an eviction is a load error."""
        try:
            self.core.hold(self._namespaces[position], job.hashes, HASH_BYTES, self.settings.load_ms)
        except Exception as error:
            self._warn("the host was not asked to keep blocks until they are loaded: %s", error)

    def _job(self, request: str, position: int, hashes: Sequence[bytes], ids: Sequence[int]) -> Job | None:
        """A job over the blocks that exist: those that a sliding window has left behind are vLLM's null block."""
        assert self._pool is not None
        null = self._pool.null_block.block_id
        if null in ids:
            kept = [at for at, block in enumerate(ids) if block != null]
            hashes, ids = [hashes[at] for at in kept], [ids[at] for at in kept]
        return self._numbered(request, position, hashes, ids) if ids else None

    def _numbered(self, request: str, position: int, hashes: Sequence[bytes], ids: Sequence[int]) -> Job:
        self._next_job += 1
        return Job(self._next_job, request, position, b"".join(hashes), np.asarray(ids, "<u4").tobytes())

    # Steps

    def build(self, output: SchedulerOutput) -> StepMetadata:
        """The jobs of a step. Saves are of whole blocks whose tokens are all computed when the step is over."""
        loads, self._loads = self._loads, []
        arrivals, self._arrivals = self._arrivals, []
        abandoned, self.handing.abandoned = self.handing.abandoned, []
        saves: list[Job] = []
        parts: list[Part] = []
        if self.ready and output.kv_connector_block_state is not None:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and not tracked.old:
                    self._save(tracked, scheduled, output, saves)
                    self._hand_over(tracked, scheduled, output, parts)
        idle = output.total_num_scheduled_tokens == 0
        return StepMetadata(self.epoch, loads, saves, parts, arrivals, abandoned, idle)

    def _hand_over(self, tracked: _Tracked, scheduled: int, output: SchedulerOutput, parts: list[Part]) -> None:
        """Begins to hand over what another engine awaits: the blocks whose last token this step computes, or had cached."""
        request, group = tracked.request, self.frame.groups[0]
        computed, each = request.num_computed_tokens + scheduled, group.block_tokens
        state = output.kv_connector_block_state
        if self.handing.next_part(request, computed) is None or state is None:
            return
        if (table := state.get_block_ids(request.request_id)) is None:
            return
        while (span := self.handing.next_part(request, computed)) is not None:
            first, last = span
            hashes = self._of_group(group, request.block_hashes, first * each, last * each)
            job = self._job(request.request_id, 0, hashes, table[group.index][first:last])
            if job is None:
                return
            self._refer(job, handed=True)
            parts.append(Part(job, *self.handing.begun(request, last, job.number), first))

    def _save(self, tracked: _Tracked, scheduled: int, output: SchedulerOutput, saves: list[Job]) -> None:
        request, frame = tracked.request, self.frame
        limit = request.num_tokens if self.settings.save_decode else request.num_prompt_tokens
        computed = min(request.num_computed_tokens + scheduled, limit, len(request.block_hashes) * frame.hash_tokens)
        if all(computed // group.block_tokens == tracked.saved // group.block_tokens for group in frame.groups):
            return
        computed = min(computed, self._affordable(tracked.saved))
        if computed <= tracked.saved:
            # Not saved now; the next step tries again, for as long as the request runs.
            return
        table = output.kv_connector_block_state.get_block_ids(request.request_id)
        if table is None:
            return
        for position, group in enumerate(frame.groups):
            ids = table[group.index][tracked.saved // group.block_tokens : computed // group.block_tokens]
            hashes = self._of_group(group, request.block_hashes, tracked.saved, computed)
            if job := self._job(request.request_id, position, hashes, ids):
                self._refer(job)
                saves.append(job)
                if self.events is not None:
                    self.events.begin(job, request, tracked.saved)
        tracked.saved = computed

    def _affordable(self, saved: int) -> int:
        """Tokens up to which blocks can be saved now without holding more of vLLM's blocks than saves may."""
        align = self.frame.align_tokens
        blocks = sum(align // group.block_tokens for group in self.frame.groups)
        units = max(0, self._holds_max - self._held) // blocks
        return saved - saved % align + units * align

    def _refer(self, job: Job, *, handed: bool = False) -> None:
        assert self._pool is not None
        ids = np.frombuffer(job.blocks, "<u4").tolist()
        self._pool.touch([self._pool.blocks[block] for block in ids])
        self._holds[job.number] = _Hold(ids, self._workers, handed)
        self._count_held(handed, len(ids))

    def _count_held(self, handed: bool, blocks: int) -> None:
        if handed:
            self.handing.held += blocks
        else:
            self._held += blocks

    def update(self, output: KVConnectorOutput) -> None:
        """Takes in what the workers report of a step."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        # Before the jobs end, by which they are known.
        for number in report.broken:
            self.handing.broken(number)
        for number, workers in report.saved.items():
            hold = self._holds.get(number)
            if hold is None:
                continue
            hold.workers -= workers
            if hold.workers <= 0:
                del self._holds[number]
                self.handing.ended(number)
                self._release(hold)
                if self.events is not None:
                    self.events.end(number)
        for request_id in report.failed:
            if tracked := self._tracked.get(request_id):
                # What the host lacks is saved again once it is computed.
                tracked.refused, tracked.match, tracked.saved = True, None, 0
        for request_id in report.missed:
            # An arrival is awaited once, so that the next match is an ordinary one.
            if tracked := self._tracked.get(request_id):
                tracked.match, tracked.saved = None, 0

    def _release(self, hold: _Hold) -> None:
        assert self._pool is not None
        self._count_held(hold.handed, -len(hold.blocks))
        # The last block first, so that vLLM evicts the end of a prefix before its beginning.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(hold.blocks)])

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets a request. What is returned goes to the client in `kv_transfer_params`."""
        tracked = self._tracked.pop(request.request_id, None)
        handed = self.handing.finished(request, request.request_id in self._loading)
        self._loading.discard(request.request_id)
        if tracked is not None and self.ready:
            full = min(request.num_computed_tokens, len(request.block_hashes) * self.frame.hash_tokens)
            group = self.frame.groups[0]
            dropped = full // group.block_tokens - tracked.saved // group.block_tokens
            if dropped > 0 and self.settings.save_decode:
                self.counts["save_dropped_blocks"] += dropped
        return handed

    @property
    def saving(self) -> bool:
        """Whether the engine must go on stepping, as completions only travel on steps."""
        return bool(self._holds)

    @property
    def frees_soon(self) -> bool:
        """Whether waiting is better than preempting: a block is held by a save alone, and by one that does not hang."""
        if self._pool is None:
            return False
        started, blocks = time.monotonic() - FREES_SECONDS, self._pool.blocks
        return any(
            hold.since > started and any(blocks[block].ref_cnt == 1 for block in hold.blocks)
            for hold in self._holds.values()
        )

    def reset(self) -> bool:
        """Forgets everything, as the weights may have changed: from now on other keys are used.

        False while loads of the old blocks are under way, which end as failures and are computed; and where vLLM has kept
        old KV, since it calls this although its own reset failed. Then nothing is loaded or saved before a reset that succeeds.
        """
        self.epoch = os.urandom(16)
        self._rename()
        for tracked in self._tracked.values():
            tracked.match, tracked.saved, tracked.old = None, 0, True
        self.handing.reset(self._loading)
        if self.events is not None:
            self.events.reset()
        self._unclean = self._pool is not None and _keeps_kv(self._pool)
        return not self._loading and not self._unclean

    def take_events(self) -> Sequence[KVCacheEvent]:
        """What vLLM publishes of the host's blocks, since the last step."""
        return self.events.take(self._namespaces) if self.events is not None else ()

    def stats(self) -> KvasirStats | None:
        return KvasirStats.of(self.counts)

    def shutdown(self) -> None:
        self.core.close()

    def _warn(self, text: str, error: Exception) -> None:
        """Not more than one line a minute, as the host may be away for long."""
        now = time.monotonic()
        if now - self._warned > 60:
            self._warned = now
            logger.warning(f"kvasir: {text}", error)


def _keeps_kv(pool: BlockPool) -> bool:
    """Whether blocks are in use, besides vLLM's null block, or cached."""
    used = pool.num_gpu_blocks - pool.get_num_free_blocks()
    return used != 1 or any(block.block_hash is not None for block in pool.blocks)
