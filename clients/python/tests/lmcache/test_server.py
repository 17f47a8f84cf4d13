"""LMCache's server core: its memory, its store and prefetch controllers, and our client as its second level."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache.v1", reason="LMCache is not installed: see clients/python/tests/lmcache/install.sh")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache_parts import CHUNK, WAIT_S, key, manager_config, plugin, until


class Stored(L2AdapterListener):
    """Says when so many chunks were stored."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks
        self.all = threading.Event()

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self._left -= len(keys)
        if self._left <= 0:
            self.all.set()

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        pass

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        pass


@pytest.fixture
def start(shared_host: Any, request: pytest.FixtureRequest) -> Iterator[Callable[[], StorageManager]]:
    """Starts the server's core, as its command line would, and closes the one before."""
    made: list[StorageManager] = []

    def make() -> StorageManager:
        while made:
            made.pop().close()
        made.append(StorageManager(manager_config(plugin(shared_host.endpoint, model_id=request.node.nodeid))))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def write(manager: StorageManager, keys: list[Any]) -> list[torch.Tensor]:
    """Writes chunks, waits until they are in the second level, and returns what was written."""
    stored = Stored(len(keys))
    manager.register_l2_listener(stored)
    room = manager.reserve_write(keys, CHUNK)
    written = []
    for name in keys:
        room[name].tensor.copy_(torch.randn(CHUNK.shapes[0]))
        written.append(room[name].tensor.clone())
    manager.finish_write(keys)
    assert stored.all.wait(WAIT_S)
    return written


def forget(manager: StorageManager, keys: list[Any]) -> None:
    """Deletes chunks from memory, which LMCache refuses while its store controller has not finished with them."""
    deleted = 0

    def all_deleted() -> bool:
        nonlocal deleted
        deleted += manager.delete_l1_keys(keys)[0]
        return deleted == len(keys)

    until(all_deleted)


def prefetch(manager: StorageManager, keys: list[Any]) -> tuple[int, int]:
    """How many chunks are in memory afterwards: (in all, from the second level)."""
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, CHUNK)]))
    assert manager.wait_prefetch_status(handle, WAIT_S)
    result = manager.query_prefetch_status(handle)
    return result.hit_cells[0].popcount(), result.l2_hit_cells[0].popcount()


def read(manager: StorageManager, keys: list[Any]) -> list[torch.Tensor]:
    with manager.read_prefetched_results(keys) as objects:
        copies = [chunk.tensor.clone() for chunk in objects]
    manager.finish_read_prefetched(keys)
    return copies


def test_chunks_leave_memory_and_come_back(start: Callable[[], StorageManager]) -> None:
    manager, keys = start(), [key(number) for number in range(8)]
    written = write(manager, keys)
    forget(manager, keys)
    assert prefetch(manager, keys) == (8, 8)
    assert all(torch.equal(one, other) for one, other in zip(written, read(manager, keys)))


def test_another_server_hits_the_known_beginning(start: Callable[[], StorageManager]) -> None:
    keys = [key(number) for number in range(8)]
    written = write(start(), keys[:5])
    other = start()
    assert prefetch(other, keys) == (5, 5)
    assert all(torch.equal(one, again) for one, again in zip(written, read(other, keys[:5])))


def test_the_servers_own_hashes_are_strong_enough() -> None:
    # Its default; a hash of eight bytes would be refused, and nothing stored.
    hashes = TokenHasher(chunk_size=256).compute_chunk_hashes(list(range(1024)))
    assert [len(one) for one in hashes] == [32] * 4
