"""LMCache's `NativeConnectorL2Adapter` drives `KvasirClient` over a real host."""

from __future__ import annotations

import importlib.metadata
import os
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lmcache.v1", reason="LMCache is not installed: see clients/python/tests/lmcache/install.sh")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache_parts import CHUNK, key, until, wait

from kvasir.lmcache import KvasirClient

KEYS = [key(number) for number in range(8)]
Start = Callable[..., Any]
Chunks = Callable[..., list[Any]]


def store(adapter: Any, keys: list[Any], objects: list[Any]) -> bool:
    task = adapter.submit_store_task(keys, objects)
    reported(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task].is_successful()


def found(adapter: Any, keys: list[Any]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {0: CHUNK})
    reported(adapter.get_lookup_and_lock_event_fd())
    return bools(adapter.query_lookup_and_lock_result(task), keys)


def load(adapter: Any, keys: list[Any], objects: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    reported(adapter.get_load_event_fd())
    return bools(adapter.query_load_result(task), keys)


def reported(descriptor: int) -> None:
    wait(descriptor)
    os.eventfd_read(descriptor)


def bools(bitmap: Any, keys: list[Any]) -> list[bool]:
    return [bool(bitmap.test(at)) for at in range(len(keys))]


def same(ones: list[Any], others: list[Any]) -> list[bool]:
    return [torch.equal(one.tensor, other.tensor) for one, other in zip(ones, others)]


def test_chunks_come_back_as_they_were(start: Start, chunks: Chunks) -> None:
    adapter, source, target = start(), chunks(8), chunks(8)
    assert found(adapter, KEYS) == [False] * 8
    assert store(adapter, KEYS, source)
    assert found(adapter, KEYS) == [True] * 8
    assert load(adapter, KEYS, target) == [True] * 8
    assert same(source, target) == [True] * 8


def test_each_key_has_its_own_answer(start: Start, chunks: Chunks) -> None:
    adapter, source, target = start(), chunks(8), chunks(8)
    before = [chunk.tensor.clone() for chunk in target]
    odd = [at % 2 == 1 for at in range(8)]
    assert store(adapter, KEYS[1::2], source[1::2])
    assert found(adapter, KEYS) == odd
    assert load(adapter, KEYS, target) == odd
    assert same(source, target) == odd
    assert all(torch.equal(before[at], target[at].tensor) for at in range(0, 8, 2))


def test_storing_again_is_ok(start: Start, chunks: Chunks) -> None:
    adapter, source = start(), chunks(4)
    assert store(adapter, KEYS[:4], source) and store(adapter, KEYS[:4], source)


def test_deleted_chunks_are_gone(start: Start, chunks: Chunks) -> None:
    adapter, source = start(), chunks(4)
    store(adapter, KEYS[:4], source)
    adapter.delete(KEYS[:2])
    assert found(adapter, KEYS[:4]) == [False, False, True, True]
    assert adapter.get_usage().total_bytes_used == 2 * source[0].get_size()


def test_a_chunk_of_another_size_is_not_loaded(start: Start, chunks: Chunks) -> None:
    adapter = start()
    half = MemoryLayoutDesc([torch.Size([2, 2, 256, 64])], [torch.bfloat16])
    store(adapter, KEYS[:2], chunks(2))
    target = chunks(1, half)
    before = target[0].tensor.clone()
    assert load(adapter, KEYS[:1], target) == [False]
    assert torch.equal(target[0].tensor, before)


@pytest.mark.parametrize(
    "other",
    [{"model_id": "other"}, {"weights_version": "2"}, {"kv_dtype": "float16"}],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_does_not_hit(start: Start, chunks: Chunks, other: dict[str, Any]) -> None:
    store(start(), KEYS, chunks(8))
    assert found(start(**other), KEYS) == [False] * 8


def test_users_groups_and_ranks_are_kept_apart(start: Start, chunks: Chunks) -> None:
    adapter = start()
    store(adapter, [key(1, cache_salt="ann")], chunks(1))
    others = [key(1), key(1, cache_salt="bob"), key(1, cache_salt="ann", object_group_id=1), key(1, cache_salt="ann")]
    assert found(adapter, others) == [False, False, False, True]


def test_weak_hashes_are_neither_stored_nor_found(start: Start, chunks: Chunks) -> None:
    weak = type(KEYS[0])(chunk_hash=(1).to_bytes(8, "big"), model_name="org/model", kv_rank=0)
    assert not store(start(), [weak], chunks(1))
    assert found(start(), [weak]) == [False]


def test_a_dead_host_fails_batches_and_one_that_returns_is_used_again(host: Any, start: Start, chunks: Chunks) -> None:
    adapter, source, target = start(endpoint=host.endpoint), chunks(4), chunks(4)
    assert store(adapter, KEYS[:4], source)
    host.kill()
    assert not store(adapter, KEYS[4:], source)
    assert found(adapter, KEYS[:4]) == [False] * 4
    host.start()
    # The client tries the host again when its pause is over, a second at most.
    until(lambda: store(adapter, KEYS[:4], source))
    assert load(adapter, KEYS[:4], target) == [True] * 4
    assert same(source, target) == [True] * 4


def test_a_silent_host_fails_batches(host: Any, start: Start, chunks: Chunks) -> None:
    adapter, source = start(endpoint=host.endpoint, match_ms=300, load_ms=300, save_ms=300), chunks(4)
    store(adapter, KEYS[:4], source)
    host.hang()
    assert not store(adapter, KEYS[4:], source)
    assert found(adapter, KEYS[:4]) == [False] * 4
    assert len(load(adapter, KEYS[:4], chunks(4))) == 4


def test_another_release_of_lmcache_does_not_hit(start: Start, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    store(start(), KEYS, chunks(8))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert found(start(), KEYS) == [False] * 8


# The client itself, without LMCache around it.

PARAMS = {"model_id": "org/m@1", "kv_dtype": "bfloat16", "match_ms": 5000}


def drained(client: KvasirClient) -> Any:
    wait(client.event_fd())
    return client.drain_completions()


def test_a_drain_empties_the_descriptor(shared_host: Any) -> None:
    client = KvasirClient(**PARAMS, host=shared_host.endpoint)
    data, back = os.urandom(100_000), bytearray(100_000)
    name = "org/m@00000001@0@" + "7" * 64
    assert drained_all(client, [client.submit_batch_set([name], [data])]) == {1: (True, [True])}
    assert drained_all(client, [client.submit_batch_get([name], [back]), client.submit_batch_exists([name])]) == {
        2: (True, [True]),
        3: (True, [True]),
    }
    assert bytes(back) == data
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)
    assert client.drain_completions() == [] and poll.poll(0) == []
    client.close()
    client.close()


def drained_all(client: KvasirClient, numbers: list[int]) -> dict[int, tuple[bool, list[bool] | None]]:
    ended: dict[int, tuple[bool, list[bool] | None]] = {}
    while set(numbers) - set(ended):
        for number, ok, _, result in drained(client):
            assert number not in ended, "reported twice"
            ended[number] = (ok, result)
    return ended


def test_every_wrong_batch_is_reported(shared_host: Any) -> None:
    client = KvasirClient(**PARAMS, host=shared_host.endpoint)
    name = "org/m@00000001@0@" + "8" * 64
    numbers = [
        client.submit_batch_get([name], [b"not writable"]),
        client.submit_batch_get([name], []),
        client.submit_batch_set([name], [object()]),
        client.submit_batch_exists(["no key of lmcache"]),
        client.submit_batch_delete(["a@b@c@12"]),
    ]
    assert drained_all(client, numbers) == {number: (False, [False]) for number in numbers}
    empty = [client.submit_batch_exists([]), client.submit_batch_get([], [])]
    assert set(drained_all(client, empty)) == set(empty)
    client.close()


def test_a_question_that_found_no_thread_is_reported_once(shared_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = KvasirClient(**PARAMS, host=shared_host.endpoint)
    name = "org/m@00000001@0@" + "9" * 64
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        refused = client.submit_batch_exists([name])
    assert drained_all(client, [refused]) == {refused: (False, [False])}
    asked = client.submit_batch_exists([name])
    assert drained_all(client, [asked]) == {asked: (True, [False])}
    client.close()


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, '"host"'),
        ({"host": "unix:/x", "model_id": "m@1"}, '"kv_dtype"'),
        ({"host": "unix:/x", "kv_dtype": "a"}, '"model_id": "org/model@revision"'),
        ({"host": "x", "model_id": "m@1", "kv_dtype": "a"}, "x"),
        ({"host": "unix:/x", "port": 1}, "port"),
    ],
)
def test_a_wrong_configuration_is_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KvasirClient(**params)
