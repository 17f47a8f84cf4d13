"""SGLang's own pools and its own cache controller, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 16
LAYERS = 4
TOKENS = 512
WAIT_S = 300
"""After this a test has failed: SGLang's threads said nothing."""


def mha(layout: str = "page_first", tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A device pool (on the CPU) and its host pool: (device, host)."""
    device = MHATokenToKVPool(
        size=tokens, page_size=PAGE, dtype=dtype, head_num=2, head_dim=64, layer_num=LAYERS, device="cpu", enable_memory_saver=False
    )
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(), 2.0, 0, PAGE, layout,
        pin_memory=False, device="cpu", device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
    return device, host


def mla(layout: str = "page_first", tokens: int = TOKENS) -> Any:
    """The same for latent attention."""
    device = MLATokenToKVPool(
        size=tokens, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout,
        pin_memory=False, device="cpu", device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip
    return device, host


def fill(pool: Any) -> None:
    """Other bytes on every page."""
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(pool.kv_buffer.dtype))


def page(pool: Any, index: int) -> torch.Tensor:
    """The page that starts at `index`, as SGLang reads it."""
    return pool.get_data_page(index, flat=True).clone()


def extra_config(endpoint: str, **more: Any) -> dict[str, Any]:
    """What a user writes."""
    return {
        "backend_name": "kvasir",
        "module_path": "kvasir.sglang",
        "class_name": "KvasirStorage",
        "interface_v1": 1,
        "host": endpoint,
        "model_id": "tests/tiny@1",
        # A machine that runs tests answers late; what happens then has tests of its own.
        "match_ms": 5000,
        **more,
    }


def storage_config(extra: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    """What SGLang hands to a storage backend."""
    config = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
        "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**config, **more})


class Engine:
    """SGLang's controller with its threads, and the two waits of a test."""

    def __init__(self, controller: HiCacheController, pool: Any) -> None:
        self.controller = controller
        self.pool = pool
        self.storage = controller.storage_backend
        self._requests = 0

    def hashes(self, tokens: list[int]) -> list[str]:
        return self.controller.get_hash_str(tokens, None, page_size=PAGE)

    def save(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Tokens that the backup thread says are stored."""
        self.controller.write_storage(indices, tokens, hash_value=self.hashes(tokens))
        return _next(self.controller.ack_backup_queue).completed_tokens

    def ask(self, tokens: list[int]) -> Any:
        """The prefetch thread's answer: an operation with `storage_hit_count`."""
        self._requests += 1
        self.controller.prefetch(f"request-{self._requests}", tokens)
        return _next(self.controller.prefetch_hit_queue)

    def load(self, operation: Any, indices: torch.Tensor) -> int:
        """Tokens that the prefetch I/O thread loaded to `indices`."""
        operation.host_indices = indices
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = _next(self.controller.ack_prefetch_queue)
            if ack.completed_req:
                return loaded
            loaded = ack.completed_tokens


def until(condition: Callable[[], bool]) -> None:
    """Asks again until it is so; fails after WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        # What is waited for may need this core.
        time.sleep(0.01)


def _next(queue: Queue[Any]) -> Any:
    return queue.get(timeout=WAIT_S)


class Allocator:
    """The one thing the controller asks of its allocator at start: the device pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool
