"""`KvasirConnector`: vLLM's hooks, passed on to the half that lives in this process.

Loads are always asynchronous: with synchronous ones vLLM 0.32 can give wrong output after a load error. Whole blocks are
copied between steps; only prompts that are handed over to another engine go layer by layer, in `save_kv_layer`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvasir.vllm.geometry import model_identity
from kvasir.vllm.messages import StepMetadata
from kvasir.vllm.scheduler import SchedulerHalf
from kvasir.vllm.settings import Settings
from kvasir.vllm.stats import KvasirPromMetrics, KvasirStats
from kvasir.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):
    """A Kvasir host as vLLM's external KV cache, for KV caches in host memory.

    Raises ValueError at start for settings that cannot be right; after that, whatever happens to the host, requests are
    computed as if it were not there.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        check(vllm_config, settings)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings)
        else:
            self.worker = WorkerHalf(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBHNC"

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.meet(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        assert self.scheduler is not None
        return self.scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self.scheduler is not None
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.update(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return False, self.scheduler.finished(request)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.saving

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.frees_soon

    def reset_cache(self) -> bool | None:
        assert self.scheduler is not None
        return self.scheduler.reset()

    def take_events(self) -> Sequence[KVCacheEvent]:
        assert self.scheduler is not None
        return self.scheduler.take_events()

    # Worker

    def register_kv_caches(self, kv_caches: Any) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        assert self.worker is not None
        return self.worker.handshake()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        # vLLM calls start_load_kv only after the forward pass, and layers are computed in it.
        if self.worker is not None:
            self.worker.start_parts(self._step())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        self.worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        self.worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        assert self.worker is not None
        if sys.exc_info()[0] is None:
            self.worker.start_saves(self._step())
        else:
            # vLLM calls this in a `finally`, and the forward pass has raised: nobody knows what the step has computed.
            self.worker.drop_saves(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None
        step = self._step() if self.has_connector_metadata() else StepMetadata()
        finished, failed = self.worker.results(step)
        # With one group, vLLM learns of failures by blocks and keeps what came before them.
        several = len(self.worker.frame.groups) > 1
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed if several else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        assert self.worker is not None
        return self.worker.report()

    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    # Both

    def get_kv_connector_stats(self) -> KvasirStats | None:
        half = self.scheduler or self.worker
        return half.stats() if half is not None else None

    def shutdown(self) -> None:
        half = self.scheduler or self.worker
        if half is not None:
            half.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvasirStats:
        return KvasirStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvasirPromMetrics:
        return KvasirPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def check(config: VllmConfig, settings: Settings) -> None:
    """ValueError for what would give wrong output or lose requests; each says what to write instead."""
    transfer, cache = config.kv_transfer_config, config.cache_config
    assert transfer is not None
    if cache.prefix_caching_hash_algo not in ("sha256", "sha256_cbor"):
        raise ValueError(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} lets two prompts share a hash, and kvasir would "
            "serve one the KV of the other; use sha256 or sha256_cbor"
        )
    if transfer.kv_load_failure_policy != "recompute" and not settings.allow_fail:
        raise ValueError(
            'kv_load_failure_policy is "fail", so that requests fail when the host loses a block; set '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, or "allow_fail": true to keep it'
        )
    if transfer.kv_role != "kv_both":
        raise ValueError(f"kv_role is {transfer.kv_role!r}; kvasir loads and saves, which is 'kv_both'")
    if config.lora_config is not None and not settings.adapters_version:
        raise ValueError(
            "vLLM's block hashes know a LoRA adapter by its name and path, not by its weights, and kvasir would serve one "
            'adapter the KV of another; add "adapters_version" to kv_connector_extra_config: a word that changes whenever '
            "an adapter does"
        )
    if config.device_config.device_type not in ("cpu", "cuda"):
        raise ValueError(
            f"the KV cache lies in the memory of {config.device_config.device_type!r}, and KvasirConnector reaches 'cpu' "
            "and 'cuda' only; use OffloadingConnector with the tier kvasir.vllm.KvasirTier"
        )
    model_identity(config, settings)
