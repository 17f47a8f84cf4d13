"""Fixtures of the tests with SGLang; what they are made of is in `sglang_parts.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.runtime_context import get_parallel
from sglang_parts import PAGE, Allocator, Engine, extra_config


@pytest.fixture(scope="session", autouse=True)
def small_machine() -> None:
    """SGLang wants 10 GB free beside a pool; these pools are small."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of one rank."""
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def start_engine(group: Any) -> Iterator[Callable[..., Engine]]:
    """Starts controllers with the storage backend that their extra config names."""
    engines: list[Engine] = []
    one = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0)

    def start(pools: Any, extra: dict[str, Any]) -> Engine:
        device, host = pools
        controller = HiCacheController(
            Allocator(device), host, PAGE, group, threading.Event(),
            storage_backend="dynamic", model_name="tiny", storage_backend_extra_config=dict(extra),
        )  # fmt: skip
        engines.append(Engine(controller, host))
        return engines[-1]

    with one:
        yield start
        for engine in engines:
            engine.controller.detach_storage_backend()


@pytest.fixture
def extra(host: Any) -> dict[str, Any]:
    """The extra config for the test's own host."""
    return extra_config(host.endpoint)


