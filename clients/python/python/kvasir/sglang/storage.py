"""The storage backend: what SGLang asks of its third tier, answered by a Kvasir host.

SGLang calls from three threads a rank: one asks which pages are there, one loads, one saves. Every call is bounded by the
core's deadlines, and a host that is away means no hits and no saves, never an exception in those threads. Only
construction and registration raise, and they say what to change.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvasir import Error
from kvasir._jobs import Done, Jobs
from kvasir.sglang.hits import fold
from kvasir.sglang.keys import HASH_BYTES, namespace, page_hashes, replicated
from kvasir.sglang.pools import Pages, pages_of
from kvasir.sglang.settings import Settings, engine_facts, has_adapters

logger = logging.getLogger(__name__)

STATS_KEPT = 4096
"""Measurements kept between two readings of `get_stats`."""


@dataclass(frozen=True)
class Pool:
    """One registered host pool."""

    host: Any
    pages: Pages
    plan: int
    namespace: bytes
    writes: bool
    """Whether this rank stores this pool's pages, or another one stores the same bytes."""

    @property
    def page_bytes(self) -> int:
        return sum(size for _, size, _ in self.pages.runs)


class KvasirStorage(HiCacheStorage):  # type: ignore[misc]
    """HiCache's third tier on a Kvasir host. SGLang builds it as `KvasirStorage(storage_config, kwargs)`."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        if storage_config.should_split_heads:
            raise ValueError('kvasir does not split heads over TP sizes; remove "tp_lcm_size" from the extra config')
        self.storage_config = storage_config
        self.settings = Settings.of(storage_config.extra_config)
        self._facts = engine_facts()
        self._model = self.settings.model(self._facts)
        self._core = self.settings.core()
        self._jobs = Jobs(self._core)
        self._pools: dict[str, Pool] = {}
        self._epoch = ""
        self._off = has_adapters() and not self.settings.adapters_version
        if self._off:
            logger.warning(
                "kvasir: nothing is loaded or saved, as SGLang serves LoRA adapters and names them by their paths, where others "
                'may lie tomorrow. Write "adapters_version" in %s: a name that changes whenever an adapter does',
                self.settings.where,
            )
        self._away = False
        self._stats: dict[str, deque[float]] = {name: deque(maxlen=STATS_KEPT) for name in ("pages_in", "in", "pages_out", "out")}

    # Registration.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of `batch_get_v1` and `batch_set_v1`; ValueError if its memory cannot be used as it lies."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool of a hybrid model, such as a window's or Mamba's states."""
        self._register(host_pool_name, host_pool)

    def _register(self, name: Any, host: Any) -> None:
        name = str(name)
        known = self._pools.get(name)
        if known is not None and known.host is host:
            return
        pages = pages_of(host)
        digest = namespace(name, host, pages, self.storage_config, self.settings, self._model, self._facts, self._epoch)
        self._pools[name] = Pool(
            host=host,
            pages=pages,
            plan=self._core.plan(digest, pages.packed(), pages.count, pages.owner),
            namespace=digest,
            writes=not replicated(name, host, self.storage_config) or self.storage_config.is_storage_writer,
        )
        if known is not None:
            self._drop(known)
        page_bytes = self._pools[name].page_bytes
        logger.info("kvasir stores pool %s: %d pages of %d B in %d runs", name, pages.count, page_bytes, len(pages.runs))

    def _drop(self, pool: Pool) -> None:
        try:
            self._core.unplan(pool.plan)
        except (RuntimeError, ValueError) as failure:
            # Its loads and saves run out, and it stays until the client closes: the memory is kept, nothing is wrong.
            logger.debug("kvasir: a pool was registered again while its pages moved: %s", failure)

    # What SGLang calls for one pool.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the leading `keys` are there."""
        pool = self._usable(PoolName.KV)
        if pool is None or not keys:
            return 0
        try:
            hits: int = self._core.prefix([pool.namespace], page_hashes(keys), HASH_BYTES)
        except Error as failure:
            return self._unavailable(failure) or 0
        self._away = False
        return hits

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads whole pages to where `host_indices` says; True for each page that lies there, checked."""
        return self._wait_load(self._start_load(PoolName.KV, keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Saves whole pages; True for each page that is stored, by this call, an earlier one or another rank's."""
        return self._save(PoolName.KV, keys, host_indices)

    # The same for several pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The usable prefix of all pools, and every length at which a prefix could end."""
        pages = self.batch_exists(keys, extra_info)
        if not pages:
            return PoolTransferResult(0, {}, [])
        hits = {PoolName.KV: pages}
        there = []
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of the same pages, which never gates a hit; not stored by this backend
            there.append((transfer, self._there(transfer.name, keys[:pages])))
        restorable = fold(pages, there, hits)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_get_v1` for several pools at once."""
        started = []
        try:
            for transfer in transfers:
                started.append(self._start_load(transfer.name, transfer.keys or [], transfer.host_indices))
        finally:
            # SGLang frees the pages of all pools when this ends, also when a later load could not be started.
            results = [self._wait_load(one) for one in started]
        return {t.name: result for t, result in zip(transfers, results)}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_set_v1` for several pools."""
        return {t.name: self._save(t.name, t.keys or [], t.host_indices) for t in transfers}

    # Loads and saves.

    def _start_load(self, name: Any, keys: Sequence[str], indices: torch.Tensor | None) -> tuple[int, Pool | None, Any]:
        pool = self._usable(name)
        numbers = pool.pages.numbers(indices, len(keys)) if pool is not None else None
        if not keys or pool is None or numbers is None:
            if pool is not None and keys:
                logger.error("kvasir: the indices of pool %s do not name %d whole pages; nothing is loaded", name, len(keys))
            return len(keys), None, None
        hashes = page_hashes(keys)
        began = time.perf_counter()
        return len(keys), pool, (began, self._start("load", pool, hashes, numbers))

    def _wait_load(self, started: tuple[int, Pool | None, Any]) -> list[bool]:
        count, pool, under_way = started
        if pool is None:
            return [False] * count
        began, future = under_way
        here = self._wait(future, count, "load")
        self._measure("in", sum(here) * pool.page_bytes, sum(here), began)
        return here

    def _save(self, name: Any, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._usable(name)
        if pool is None:
            return [False] * len(keys)
        if not pool.writes or not keys:
            return [True] * len(keys)
        numbers = pool.pages.numbers(indices, len(keys))
        if numbers is None:
            logger.error("kvasir: the indices of pool %s do not name %d whole pages; nothing is saved", name, len(keys))
            return [False] * len(keys)
        # A page that is stored already is not gathered again: most saves of a shared prefix end here.
        was_away = self._away
        stored = self._there(name, keys)
        missing = [at for at, here in enumerate(stored) if not here]
        # A host that did not answer in time once may still take the pages; one that keeps silent is not waited for.
        if missing and not (was_away and self._away):
            began = time.perf_counter()
            hashes = page_hashes([keys[at] for at in missing])
            blocks = b"".join(numbers[4 * at : 4 * at + 4] for at in missing)
            saved = self._wait(self._start("save", pool, hashes, blocks), len(missing), "save")
            self._measure("out", sum(saved) * pool.page_bytes, sum(saved), began)
            for at, ok in zip(missing, saved):
                stored[at] = ok
        return stored

    def _start(self, way: str, pool: Pool, hashes: bytes, blocks: bytes) -> Future[Done] | None:
        submit = self._core.load if way == "load" else self._core.save
        try:
            return self._jobs.start(lambda job: submit(job, pool.plan, hashes, HASH_BYTES, blocks))
        except (Error, RuntimeError) as failure:
            self._unavailable(failure)
        except Exception as failure:
            # Such as the KeyError of a plan that `clear` dropped after this thread took its pool.
            logger.warning("kvasir: a %s of %d pages was not started: %r", way, len(blocks) // 4, failure)
        return None

    def _wait(self, future: Future[Done] | None, count: int, way: str) -> list[bool]:
        if future is None:
            return [False] * count
        # Without a limit of its own: SGLang frees or reuses the pages when this returns, so it must be after the last copy.
        # The core ends every job by load_ms or save_ms.
        done = future.result()
        if not done.ok:
            logger.debug("kvasir: %s of %d pages: %s", way, count, done.error)
        return [bool(byte) for byte in done.here] if len(done.here) == count else [False] * count

    def _there(self, name: Any, keys: Sequence[str]) -> list[bool]:
        pool = self._usable(name)
        if pool is None or not keys:
            return [False] * len(keys)
        try:
            there = self._core.exists(pool.namespace, page_hashes(keys), HASH_BYTES)
        except Error as failure:
            self._unavailable(failure)
            return [False] * len(keys)
        self._away = False
        return [bool(byte) for byte in there]

    # State.

    def _usable(self, name: Any) -> Pool | None:
        """The pool, unless its pages and the store's may be of different weights or adapters."""
        if not self._off and self._facts.get("weight_version") != engine_facts().get("weight_version"):
            self._off = True
            logger.error(
                "kvasir: the weights changed while SGLang ran; nothing is loaded or saved until the storage backend is "
                "detached and attached again"
            )
        return None if self._off else self._pools.get(str(name))

    def _unavailable(self, failure: Exception) -> None:
        if not self._away:
            self._away = True
            logger.warning("kvasir: the host cannot be asked, so there are no hits and no saves until it answers: %s", failure)

    def clear(self) -> None:
        """Forgets what is stored, for this engine: its pages get other keys from now on.

        What others stored stays for them. Ranks that share one writer's pages (MLA) have no common new key, so only the
        writer hits until a restart.
        """
        self._epoch = secrets.token_hex(16)
        pools, self._pools = self._pools, {}
        for name, pool in pools.items():
            self._register(name, pool.host)
            self._drop(pool)

    def close(self) -> None:
        """Ends the connections. Loads and saves under way end first."""
        self._jobs.close()

    # Numbers.

    def counters(self) -> dict[str, int]:
        """The client's counters since it was made; see docs/engines/sglang.md."""
        return dict(self._core.counters())

    def _measure(self, way: str, copied: int, pages: int, began: float) -> None:
        if self.storage_config.enable_storage_metrics and pages:
            self._stats[f"pages_{way}"].append(pages)
            self._stats[way].append(copied / (1 << 30) / max(time.perf_counter() - began, 1e-9))

    def get_stats(self) -> Any:
        """Pages and GiB/s of the loads and saves since the last call, for SGLang's own metrics."""
        if not self.storage_config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        taken = {name: [kept.popleft() for _ in range(len(kept))] for name, kept in self._stats.items()}
        return StorageMetrics(
            prefetch_pgs=taken["pages_in"],
            backup_pgs=taken["pages_out"],
            prefetch_bandwidth=taken["in"],
            backup_bandwidth=taken["out"],
        )

    # Deprecated by SGLang, and not called with "interface_v1".

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        """Refused; see `_copying`."""
        _copying()

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        """Refused; see `_copying`."""
        _copying()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        """Refused; see `_copying`."""
        _copying()

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        """Refused; see `_copying`."""
        _copying()


def _copying() -> NoReturn:
    # SGLang must never get a tensor of pages in another order than the pool's, so there is one way only.
    raise NotImplementedError('kvasir moves pages in place (batch_get_v1, batch_set_v1): set "interface_v1": 1')
