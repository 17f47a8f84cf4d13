"""Hosts that are gone, hang or come back, and processes that fork or end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
from daemon import Host
from engine import NAMESPACE, Memory, hash_of, hashes, load, numbers, save, wait

import kvasir
from kvasir._core import Core


def until(happens: Callable[[], bool]) -> None:
    """Asks until it happens. Whether is the question, not when."""
    for _ in range(60_000):
        if happens():
            return
        time.sleep(0.001)
    pytest.fail("a minute passed")


def answers(core: Core) -> bool:
    try:
        core.prefix([NAMESPACE], hash_of(0), 32)
    except kvasir.Unavailable:
        return False
    return True


def refusal(core: Core) -> str:
    with pytest.raises(kvasir.Unavailable) as refused:
        core.prefix([NAMESPACE], hashes([1]), 32)
    return str(refused.value)


def test_a_host_that_is_killed_and_started_again(host: Host) -> None:
    core = Core(host.unix, match_ms=1000, load_ms=30_000)
    memory = Memory(4)
    memory.fill(0, 1)
    plan = memory.plan(core)
    assert save(core, plan, [1], [0])[1]
    assert core.prefix([NAMESPACE], hashes([1]), 32) == 1
    first = core.boot()
    host.stop()
    with pytest.raises(kvasir.Unavailable):
        core.prefix([NAMESPACE], hashes([1]), 32)
    # The breaker: the host is not asked, and says why not; but for the question by which it sees who is back.
    until(lambda: "not asked" in refusal(core))
    core.hold([NAMESPACE], hashes([1]), 32, 100)
    _, ok, here, _, error = load(core, plan, [1], [1])
    assert (ok, here) == (False, b"\0") and error is not None
    host.start()
    until(lambda: answers(core))
    assert core.boot() not in (0, first)
    assert core.prefix([NAMESPACE], hashes([1]), 32) == 0, "misses, then hits"
    assert save(core, plan, [1], [0])[1]
    assert core.prefix([NAMESPACE], hashes([1]), 32) == 1
    assert load(core, plan, [1], [2])[1] and memory.has(2, 1)
    counters = core.counters()
    assert counters["questions_failed"] >= 1 and counters["questions_skipped"] >= 1


def test_a_host_that_comes_later(host: Host) -> None:
    host.stop()
    core = Core(host.unix, match_ms=1000)
    assert core.boot() == 0
    assert not answers(core)
    memory = Memory(1)
    assert not save(core, memory.plan(core), [1], [0])[1]
    host.start()
    until(lambda: answers(core))
    assert core.boot() != 0


def test_a_host_that_hangs_costs_a_load_its_time_and_is_reported(host: Host) -> None:
    core = Core(host.unix, match_ms=1000, load_ms=100)
    memory = Memory(2)
    plan = memory.plan(core)
    until(lambda: answers(core))
    host.hang()
    for job in range(5):
        core.load(job, plan, hash_of(job), 32, numbers([job % 2]))
    done = wait(core, 5)
    assert all(not ok and here == b"\0" and error for _, ok, here, _, error in done)
    assert not answers(core)


def test_closing_does_not_wait_for_a_host_that_hangs(host: Host) -> None:
    core = Core(host.unix, match_ms=5000, load_ms=3_600_000, save_ms=3_600_000)
    memory = Memory(2)
    plan = memory.plan(core)
    assert save(core, plan, [1], [0])[1] and load(core, plan, [1], [1])[1]
    host.hang()
    core.load(1, plan, hash_of(2), 32, numbers([0]))
    core.save(2, plan, hash_of(3), 32, numbers([1]))
    core.close()
    done = core.drain()
    assert sorted(job for job, *_ in done) == [1, 2] and not any(ok for _, ok, *_ in done)
    core.close()
    for call in (
        lambda: core.load(3, plan, hash_of(2), 32, numbers([0])),
        lambda: core.prefix([NAMESPACE], hash_of(2), 32),
        lambda: core.event_fd(),
        lambda: core.remove(NAMESPACE, [b"k"]),
    ):
        with pytest.raises(kvasir.Error, match="closed"):
            call()
    core.unplan(plan)


def test_two_processes_share_blocks(host: Host) -> None:
    core = Core(host.unix, match_ms=5000, load_ms=30_000)
    memory = Memory(2)
    memory.fill(0, 1)
    assert save(core, memory.plan(core), [1], [0])[1]
    other = run_python(
        """
        memory = Memory(1)
        core = Core(sys.argv[1], match_ms=5000, load_ms=30_000)
        assert core.prefix([NAMESPACE], hashes([1]), 32) == 1
        plan = memory.plan(core)
        assert load(core, plan, [1], [0])[1] and memory.has(0, 1)
        memory.fill(0, 2)
        assert save(core, plan, [2], [0])[1]
        """,
        host.unix,
    )
    assert other.returncode == 0, other.stderr
    assert core.prefix([NAMESPACE], hashes([2]), 32) == 1


def test_a_child_of_a_fork_makes_its_own(host: Host) -> None:
    core = Core(host.unix, match_ms=5000, load_ms=30_000)
    memory = Memory(2)
    memory.fill(0, 1)
    plan = memory.plan(core)
    assert save(core, plan, [1], [0])[1]

    def child() -> None:
        nonlocal core
        with pytest.raises(RuntimeError, match="forked"):
            core.prefix([NAMESPACE], hashes([1]), 32)
        # Dropping the parent's neither waits nor ends anything.
        del core
        own = Core(host.unix, match_ms=5000, load_ms=30_000)
        assert load(own, memory.plan(own), [1], [1])[1] and memory.has(1, 1)
        own.close()

    assert forked(child) == 0
    assert load(core, plan, [1], [1])[1], "the parent's goes on"


def test_children_of_a_busy_process_make_their_own(host: Host) -> None:
    """At a fork threads of the parent's, which the child has not, wait for its locks, or are about to."""
    core = Core(host.unix, load_threads=8, match_ms=5000, load_ms=30_000)
    memory = Memory(8)
    memory.fill(0, 1)
    plan = memory.plan(core)
    assert save(core, plan, [1], [0])[1]
    stopping = threading.Event()

    def keep_busy() -> None:
        while not stopping.is_set():
            for job in range(8):
                core.load(job, plan, hash_of(1), 32, numbers([job]))
            wait(core, 8)

    def child() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            core.load(1, plan, hash_of(1), 32, numbers([1]))
        own = Core(host.unix, load_threads=64, match_ms=5000, load_ms=30_000)
        mine = Memory(1)
        assert load(own, mine.plan(own), [1], [0])[1] and mine.has(0, 1)
        own.close()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(50):
            assert forked(child) == 0
    finally:
        stopping.set()
        busy.join()


def forked(work: Callable[[], None]) -> int:
    """How a child that does this ends: 0 if all went well, a negative number if a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # One that hangs would keep the test waiting.
            signal.alarm(60)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("ending", ["", "os.kill(int(sys.argv[2]), 19)", "del core", "sys.exit(3)"])
def test_a_process_ends_with_jobs_under_way(host: Host, ending: str) -> None:
    """At exit memory goes away in no particular order; before that, copying must have stopped. Also while the host hangs."""
    assert host.process is not None
    ended = run_python(
        f"""
        core = Core(sys.argv[1], match_ms=5000, load_ms=3_600_000, save_ms=3_600_000)
        memory = Memory(512)
        plan = memory.plan(core)
        assert save(core, plan, range(64), range(64))[1]
        for job in range(200):
            core.load(job, plan, hashes(range(64)), 32, numbers(range(64, 128)))
            core.save(1000 + job, plan, hashes(range(job * 64, job * 64 + 64)), 32, numbers(range(128, 192)))
        {ending}
        """,
        host.unix,
        str(host.process.pid),
    )
    assert ended.returncode == (3 if "exit" in ending else 0), ended.stderr
    assert ended.stderr == ""


def test_a_child_of_a_fork_may_end_as_any_process_does(host: Host) -> None:
    ended = run_python(
        """
        core = Core(sys.argv[1], match_ms=5000, load_ms=30_000)
        memory = Memory(2)
        plan = memory.plan(core)
        assert save(core, plan, [1], [0])[1]
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert load(core, plan, [1], [1])[1]
        """,
        host.unix,
    )
    assert ended.returncode == 0, ended.stderr


def run_python(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys\nfrom engine import *\nfrom kvasir._core import Core\n"
    folder = os.path.dirname(__file__)
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", head + textwrap.dedent(text), *arguments],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        timeout=300,
    )
