"""LMCache's adapter over our client, as its factory makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import (
    NativePluginL2AdapterConfig,
    _create_native_plugin_l2_adapter,
)
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache_parts import CHUNK, plugin


@pytest.fixture
def start(shared_host: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes adapters. No test hits another's chunks."""
    made: list[Any] = []

    def make(**params: Any) -> Any:
        described = plugin(**{"endpoint": shared_host.endpoint, "model_id": request.node.nodeid, **params})
        made.append(_create_native_plugin_l2_adapter(NativePluginL2AdapterConfig.from_dict(described)))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()


@pytest.fixture
def chunks() -> Iterator[Callable[[int], list[Any]]]:
    """Gives LMCache's own memory objects, each filled with other bytes."""
    memory = L1MemoryManager(L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name=""))
    given: list[Any] = []

    def give(count: int, layout: Any = CHUNK) -> list[Any]:
        _, objects = memory.allocate(layout, count)
        assert len(objects) == count
        for chunk in objects:
            chunk.tensor.copy_(chunk.tensor.new_empty(chunk.tensor.shape).normal_())
        given.extend(objects)
        return objects

    yield give
    memory.free(given)
    memory.close()
