"""Loads and saves of an engine, against a real host."""

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon import Host
from engine import LAYERS, NAMESPACE, RUN, Memory, hash_of, hashes, load, numbers, save, wait

import kvasir
from kvasir._core import LABEL_BYTES, Core

BLOCKS = 16


@pytest.fixture(params=["unix", "tcp"])
def core(host: Host, request: pytest.FixtureRequest) -> Iterator[Core]:
    # Patient: the machine may be busy with other things.
    if request.param == "unix":
        core = Core(host.unix, match_ms=5000, load_ms=30_000)
    else:
        core = Core(host.tcp, token=host.token(), match_ms=5000, load_ms=30_000)
    yield core
    core.close()


def test_blocks_come_back_where_they_are_wanted(core: Core) -> None:
    memory = Memory(BLOCKS)
    half = range(BLOCKS // 2)
    for n in half:
        memory.fill(n, n)
    plan = memory.plan(core)
    assert core.prefix([NAMESPACE], hashes(half), 32) == 0
    job, ok, here, copied, error = save(core, plan, half, half)
    assert (ok, here, copied, error) == (True, b"\1" * 8, 8 * LAYERS * RUN, None), job
    assert core.prefix([NAMESPACE], hashes(half), 32) == 8
    assert core.prefix([NAMESPACE], hashes(range(12)), 32) == 8
    assert core.exists(NAMESPACE, hashes([3, 99, 4]), 32) == b"\1\0\1"
    core.hold([NAMESPACE], hashes(half), 32, 1000)
    # In another order, and one that is not there.
    _, ok, here, copied, error = load(core, plan, [7, 99, 0], [15, 14, 8])
    assert (ok, here, copied, error) == (False, b"\1\0\1", 2 * LAYERS * RUN, None)
    assert memory.has(15, 7) and memory.has(8, 0) and memory.has(7, 7)
    _, ok, here, copied, _ = save(core, plan, half, half)
    assert (ok, here, copied) == (True, b"\1" * 8, 0), "they are stored already"
    counters = core.counters()
    assert (counters["load_bytes"], counters["load_blocks_failed"]) == (2 * LAYERS * RUN, 1)
    assert (counters["save_jobs"], counters["label_failures"]) == (2, 0)
    assert core.boot() != 0
    core.unplan(plan)


def test_a_run_ends_where_one_namespace_has_no_block(core: Core) -> None:
    others = [NAMESPACE, bytes(32), bytes([1] * 32)]
    memory = Memory(4)
    for namespace, there in zip(others, [4, 2, 3], strict=True):
        plan = memory.plan(core, namespace)
        assert save(core, plan, range(there), range(there))[1]
    assert core.prefix(others[:1], hashes(range(4)), 32) == 4
    assert core.prefix(others, hashes(range(4)), 32) == 2
    assert core.prefix([*others, bytes([9] * 32)], hashes(range(4)), 32) == 0
    assert core.prefix(others, b"", 32) == 0


def test_more_blocks_than_one_call_takes(start_host: Callable[..., Host]) -> None:
    core = Core(start_host("store.pool_bytes=64MiB").unix, match_ms=20_000, load_ms=60_000, save_ms=60_000)
    count = 9000
    memory = bytearray(b"0123456789abcdef" * count)
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    plan = core.plan(NAMESPACE, struct.pack("<QQQ", ctypes.addressof(owner), 16, 16), count, owner)
    assert save(core, plan, range(count), range(count))[1]
    assert core.prefix([NAMESPACE], hashes(range(count + 1)), 32) == count
    for at in range(count * 16):
        owner[at] = 0
    _, ok, here, copied, _ = load(core, plan, range(count), range(count))
    assert (ok, here, copied) == (True, b"\1" * count, 16 * count)
    assert memory == b"0123456789abcdef" * count


def test_what_makes_no_sense_is_refused_and_not_reported(core: Core) -> None:
    memory = Memory(4)
    plan = memory.plan(core)

    def refused(error: type[Exception], text: str | None, call: Callable[[], object]) -> None:
        with pytest.raises(error, match=text):
            call()

    base, length, stride = struct.unpack("<QQQ", memory.runs[:24])
    run = struct.Struct("<QQQ").pack
    refused(ValueError, "32 B", lambda: core.plan(b"short", memory.runs, 4))
    refused(ValueError, "24|8 B", lambda: core.plan(NAMESPACE, memory.runs[:-1], 4))
    refused(ValueError, "no memory", lambda: core.plan(NAMESPACE, b"", 4))
    refused(ValueError, "no memory", lambda: core.plan(NAMESPACE, memory.runs, 0))
    refused(ValueError, "address 0", lambda: core.plan(NAMESPACE, run(0, length, stride), 4))
    refused(ValueError, "no bytes", lambda: core.plan(NAMESPACE, run(base, 0, stride), 4))
    refused(ValueError, "overlap", lambda: core.plan(NAMESPACE, run(base, length, length - 1), 4))
    refused(ValueError, "memory there is", lambda: core.plan(NAMESPACE, run(base, length, 1 << 62), 4))
    refused(ValueError, "memory there is", lambda: core.plan(NAMESPACE, run(2**64 - 8, length, stride), 4))
    refused(ValueError, "in total", lambda: core.plan(NAMESPACE, run(base, 2**32, 2**32), 1))
    refused(ValueError, "too large", lambda: core.plan(NAMESPACE, run(base, 2**32 - LABEL_BYTES, 2**32), 1))
    refused(OverflowError, None, lambda: core.plan(NAMESPACE, memory.runs, -1))

    one = hash_of(1)

    def none_takes(error: type[Exception], text: str, *job: Any) -> None:
        refused(error, text, lambda: core.load(1, *job))
        refused(error, text, lambda: core.save(1, *job))

    none_takes(ValueError, "block 4 is not in the plan", plan, one, 32, numbers([4]))
    none_takes(ValueError, "not in the plan", plan, one, 32, numbers([2**32 - 1]))
    none_takes(ValueError, "block numbers", plan, one, 32, numbers([1, 2]))
    none_takes(ValueError, "block numbers", plan, one, 32, b"123")
    none_takes(ValueError, "whole number", plan, b"123", 2, numbers([1]))
    none_takes(ValueError, "whole number", plan, one, 0, numbers([1]))
    none_takes(KeyError, "no plan 77", 77, one, 32, numbers([1]))
    refused(ValueError, "whole number", lambda: core.prefix([NAMESPACE], b"123", 2))
    refused(ValueError, "32 B", lambda: core.prefix([b""], one, 32))
    refused(ValueError, "no namespace", lambda: core.prefix([], one, 32))
    refused(KeyError, "no plan 77", lambda: core.unplan(77))
    assert core.drain() == []
    # Nothing to do is done.
    assert save(core, plan, [], [])[1:] == (True, b"", 0, None)
    core.unplan(plan)
    refused(KeyError, "no plan", lambda: core.load(1, plan, one, 32, numbers([1])))


@pytest.mark.parametrize("host", ["nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "http://[::1]:1"])
def test_an_endpoint_that_is_none_is_told_at_once(host: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        Core(host)


@pytest.mark.parametrize("option", ["load_threads", "save_threads", "match_ms", "load_ms", "save_ms"])
def test_an_option_that_is_none_is_told_at_once(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ValueError, match=option):
        Core("unix:/nowhere", **options)


def test_times_without_end_are_times(host: Host) -> None:
    core = Core(host.unix, match_ms=2**64 - 1, load_ms=2**64 - 1, save_ms=2**64 - 1)
    assert core.prefix([NAMESPACE], hash_of(1), 32) == 0
    core.hold([NAMESPACE], hash_of(1), 32, 2**64 - 1)
    memory = Memory(1)
    assert save(core, memory.plan(core), [1], [0])[1]
    assert core.remove(NAMESPACE, [hash_of(1)]) == b"\1"


def test_a_plan_stays_while_its_jobs_are_not_drained(host: Host) -> None:
    core = Core(host.unix, match_ms=5000)
    memory = Memory(2)
    plan = memory.plan(core)
    core.save(5, plan, hash_of(1), 32, numbers([0]))
    core.save(5, plan, hash_of(2), 32, numbers([1]))
    with pytest.raises(RuntimeError, match="2 jobs of plan"):
        core.unplan(plan)
    done = wait(core, 2)
    assert [job for job, *_ in done] == [5, 5], "a number is the caller's, and may come twice"
    core.unplan(plan)


def test_the_owner_lives_as_long_as_the_plan(host: Host) -> None:
    import gc
    import weakref

    class Owner:
        pass

    core = Core(host.unix)
    memory = Memory(1)
    owner = Owner()
    gone = weakref.ref(owner)
    plan = core.plan(NAMESPACE, memory.runs, 1, owner)
    del owner
    gc.collect()
    assert gone() is not None
    core.unplan(plan)
    gc.collect()
    assert gone() is None


def test_threads_that_wait_let_others_run(host: Host) -> None:
    """Many threads, each with jobs of its own on one core: every job ends once, and right."""
    core = Core(host.unix, match_ms=30_000, load_ms=60_000)
    each, threads = 20, 8
    memory = Memory(each * threads)
    for n in range(each * threads):
        memory.fill(n, n)
    plan = memory.plan(core)
    failures: list[BaseException] = []

    def give(first: int) -> None:
        try:
            for n in range(first, first + each):
                core.save(n, plan, hash_of(n), 32, numbers([n]))
                core.prefix([NAMESPACE], hash_of(n), 32)
        except BaseException as error:
            failures.append(error)

    givers = [threading.Thread(target=give, args=(at * each,)) for at in range(threads)]
    for giver in givers:
        giver.start()
    done = wait(core, each * threads)
    for giver in givers:
        giver.join()
    assert not failures
    assert [job for job, *_ in done] == list(range(each * threads))
    assert all(ok for _, ok, *_ in done)
    assert core.prefix([NAMESPACE], hashes(range(each * threads)), 32) == each * threads


def test_the_gil_is_free_while_a_question_waits(host: Host) -> None:
    """Another thread runs Python while this one waits for a host that says nothing."""
    core = Core(host.unix, match_ms=2000)
    assert core.prefix([NAMESPACE], hash_of(1), 32) == 0
    host.hang()
    asked: list[float] = []

    def ask() -> None:
        asked.append(time.monotonic())
        with pytest.raises(kvasir.Unavailable):
            core.prefix([NAMESPACE], hash_of(1), 32)
        asked.append(time.monotonic())

    asking = threading.Thread(target=ask)
    asking.start()
    steps = []
    while asking.is_alive():
        steps.append(time.monotonic())
        time.sleep(0.001)
    begin, end = asked
    # With the GIL kept, this thread runs for a moment before the question at most; else 2,000 times, less what a
    # busy machine takes away.
    assert sum(begin < step < end for step in steps) > 20
