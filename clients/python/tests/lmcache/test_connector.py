"""LMCache's `RemoteBackend`, as it runs in an engine's process, over our connector and a real host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache.v1", reason="LMCache is not installed: see clients/python/tests/lmcache/install.sh")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache_parts import until

from kvasir.lmcache import connector
from kvasir.lmcache.connector import host_of

LAYERS, CHUNK, HEADS, DIM = 4, 256, 2, 32


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey("org/model", 1, 0, (1 << 63) + number, torch.bfloat16)


KEYS = [key(number) for number in range(6)]


class Process:
    """What LMCache has in an engine's process: memory, an event loop, and the backend."""

    def __init__(self, plugin: str, extra: dict[str, Any], **config: Any) -> None:
        settings = {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0.0625,
            "remote_storage_plugins": [plugin],
            "remote_serde": "naive",
            "extra_config": extra,
            **config,
        }
        self.config = LMCacheEngineConfig.from_dict(settings)
        self.metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, CHUNK, HEADS, DIM), role="worker")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        try:
            self.backend = RemoteBackend(self.config, self.metadata, self.loop, self.memory, dst_device="cpu", plugin_name=plugin)
        except BaseException:
            self._stop()
            raise

    def chunk(self, tokens: int = CHUNK) -> Any:
        made = self.memory.allocate(self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        made.tensor.copy_(torch.randn(made.tensor.shape))
        return made

    def save(self, keys: list[CacheEngineKey], chunks: list[Any]) -> None:
        left = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, chunks, on_complete_callback=lambda _: left.release())
        for _ in keys:
            assert left.acquire(timeout=60)

    def close(self) -> None:
        self.backend.close()
        self._stop()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.memory.memory_allocator.close()


@pytest.fixture
def start(shared_host: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Process]]:
    """Starts processes. No test hits another's chunks."""
    made: list[Process] = []

    def make(plugin: str = "kvasir", extra: dict[str, Any] | None = None, **config: Any) -> Process:
        settings = {
            "module_path": "kvasir.lmcache",
            "class_name": "KvasirConnectorAdapter",
            "url": f"kvasir://{shared_host.socket}",
            "model_id": request.node.nodeid,
            "match_ms": 5000,
            # vLLM, from which LMCache takes SHA-256, is not installed beside these tests.
            "allow_weak_hash": True,
            **(extra or {}),
        }
        named = {f"remote_storage_plugin.{plugin}.{name}": value for name, value in settings.items()}
        made.append(Process(plugin, named, **config))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.mark.parametrize("plugin", ["kvasir", "kvasir.second"])
def test_chunks_come_back_as_they_were(start: Callable[..., Process], plugin: str) -> None:
    one, other = start(plugin), start(plugin)
    chunks = [one.chunk() for _ in KEYS]
    one.save(KEYS, chunks)
    assert other.backend.contains(KEYS[0]) and not other.backend.contains(key(99))
    assert other.backend.batched_contains([*KEYS, key(99)]) == len(KEYS)
    loaded = other.backend.batched_get_blocking([*KEYS, key(99)])
    assert loaded[-1] is None
    assert all(torch.equal(chunk.tensor, back.tensor) for chunk, back in zip(chunks, loaded))
    assert torch.equal(other.backend.get_blocking(KEYS[2]).tensor, chunks[2].tensor)


def test_a_chunk_that_is_not_full_is_not_stored(start: Callable[..., Process]) -> None:
    process = start()
    process.save(KEYS[:2], [process.chunk(), process.chunk(CHUNK // 2)])
    assert process.backend.batched_contains(KEYS) == 1


def test_references_are_given_back(start: Callable[..., Process]) -> None:
    process = start()
    chunk = process.chunk()
    process.save(KEYS[:1], [chunk])
    until(lambda: chunk.get_ref_count() == 1)
    loaded = process.backend.get_blocking(KEYS[0])
    until(lambda: loaded.get_ref_count() == 1)
    assert process.backend.get_blocking(KEYS[1]) is None
    # The memory for the chunk that was not there is free again: its allocator holds two.
    until(lambda: process.memory.memory_allocator.pin_allocator.num_active_allocations == 2)


def no_buffer(memory: Any) -> memoryview:
    raise BufferError("no buffer")


@pytest.mark.parametrize("broken", [no_buffer, lambda memory: memoryview(b"not writable")], ids=["no buffer", "not writable"])
def test_references_are_given_back_after_any_error(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, broken: Callable[[Any], memoryview]
) -> None:
    process = start()
    process.save(KEYS[:1], [process.chunk()])
    active = process.memory.memory_allocator.pin_allocator
    until(lambda: active.num_active_allocations == 0)
    with monkeypatch.context() as failing:
        failing.setattr(connector, "_bytes", broken)
        assert process.backend.get_blocking(KEYS[0]) is None
    assert active.num_active_allocations == 0
    assert process.backend.get_blocking(KEYS[0]) is not None


def test_references_of_a_save_are_given_back_after_any_error(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    chunk = process.chunk()
    monkeypatch.setattr(connector, "_bytes", lambda memory: object())
    process.save(KEYS[:1], [chunk])
    assert chunk.get_ref_count() == 1


def test_memory_that_runs_out_with_an_error_is_given_back(start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
    process = start()
    process.save(KEYS[:2], [process.chunk(), process.chunk()])
    active = process.memory.memory_allocator.pin_allocator
    until(lambda: active.num_active_allocations == 0)
    allocate, given = process.memory.allocate, []

    def one(*args: Any) -> Any:
        if given:
            raise MemoryError
        given.append(allocate(*args))
        return given[-1]

    monkeypatch.setattr(process.memory, "allocate", one)
    process.backend.batched_get_blocking(KEYS[:2])
    assert len(given) == 1 and active.num_active_allocations == 0


def test_the_leading_run_is_loaded_without_waiting(start: Callable[..., Process]) -> None:
    process = start()
    process.save([KEYS[0], KEYS[2]], [process.chunk(), process.chunk()])
    loading = process.backend.connection.batched_get_non_blocking("request", KEYS[:3])
    assert len(asyncio.run_coroutine_threadsafe(loading, process.loop).result(60)) == 1


def test_removed_chunks_are_gone(start: Callable[..., Process]) -> None:
    process = start()
    process.save(KEYS[:1], [process.chunk()])
    assert process.backend.connection.remove_sync(KEYS[0])
    assert not process.backend.contains(KEYS[0])


REFUSED = [
    ({"allow_weak_hash": False}, {}, "pre_caching_hash_algorithm"),
    ({"allow_weak_hash": False}, {"pre_caching_hash_algorithm": "sha256_cbor"}, "pre_caching_hash_algorithm"),
    ({"url": ""}, {}, '"host"'),
    ({"model_id": ""}, {}, "remote_storage_plugin.kvasir.model_id"),
    ({"colour": 1}, {}, "colour"),
    ({}, {"remote_serde": "cachegen"}, "remote_serde"),
    ({}, {"use_layerwise": True}, "use_layerwise"),
]


@pytest.mark.parametrize(("extra", "config", "says"), REFUSED)
def test_a_wrong_configuration_ends_the_start(
    start: Callable[..., Process], extra: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(IrrecoverableException, match=says):
        start(extra=extra, **config)


def test_urls() -> None:
    assert host_of("kvasir:///run/kvasir.sock") == "unix:/run/kvasir.sock"
    assert host_of("kvasir://store:7430") == "tcp://store:7430"
    assert host_of("unix:/run/kvasir.sock") == "unix:/run/kvasir.sock"
