"""What is not the block that was asked for, or is damaged, is not loaded."""

import mmap
import os
import pathlib

import pytest
from daemon import Host
from engine import NAMESPACE, Memory, hashes, load, pattern, save

import kvasir
from kvasir._core import Core


def damage(host: Host, needle: bytes, at: int = 0) -> None:
    """Changes a byte of the host's pool, as a faulty client that may write does: the first ``needle``, at offset ``at``."""
    assert host.process is not None
    folder = pathlib.Path(f"/proc/{host.process.pid}/fd")
    for link in folder.iterdir():
        if "memfd" not in os.readlink(link) or link.stat().st_size < 16 << 20:
            continue
        with open(link, "r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
            where = pool.find(needle)
            if where >= 0:
                pool[where + at] ^= 0x10
                return
    pytest.fail("the block does not lie in the pool")


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_block_is_not_loaded_unless_nobody_looks(host: Host, verify: bool) -> None:
    core = Core(host.unix, match_ms=5000, load_ms=30_000, verify=verify)
    memory = Memory(4)
    memory.fill(0, 10)
    memory.fill(1, 11)
    plan = memory.plan(core)
    assert save(core, plan, [10, 11], [0, 1])[1]
    damage(host, pattern(10, 1), at=99)
    _, ok, here, *_ = load(core, plan, [10, 11], [2, 3])
    assert memory.has(3, 11)
    if verify:
        assert (ok, here) == (False, b"\0\1")
        assert core.counters()["checksum_failures"] == 1
        assert core.exists(NAMESPACE, hashes([10]), 32) == b"\0", "the host has dropped it"
    else:
        # The negative control: this is what would be used.
        assert (ok, here) == (True, b"\1\1") and not memory.has(2, 10)


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_label_is_never_loaded(host: Host, verify: bool) -> None:
    core = Core(host.unix, match_ms=5000, load_ms=30_000, verify=verify)
    memory = Memory(2)
    memory.fill(0, 10)
    plan = memory.plan(core)
    assert save(core, plan, [10], [0])[1]
    damage(host, b"KVLB\1\0\0\0" + NAMESPACE, at=20)
    _, ok, here, copied, error = load(core, plan, [10], [1])
    assert (ok, here, copied) == (False, b"\0", 0)
    counted = "checksum_failures" if verify else "label_failures"
    assert core.counters()[counted] == 1
    assert verify or (error is not None and "label is damaged" in error)


def test_a_namespace_never_sees_the_blocks_of_another(host: Host) -> None:
    core = Core(host.unix, match_ms=5000)
    memory = Memory(2)
    memory.fill(0, 1)
    ours, theirs = memory.plan(core), memory.plan(core, bytes(32))
    assert save(core, ours, [1], [0])[1]
    assert load(core, theirs, [1], [1])[1:4] == (False, b"\0", 0)
    with pytest.raises(kvasir.Mismatch, match="stored with"):
        core.get(NAMESPACE, hashes([1]), bytearray(5))


def test_over_tcp_a_wrong_token_is_refused_and_counts_as_absent(host: Host) -> None:
    core = Core(host.tcp, token="kv_wrong", match_ms=5000)
    memory = Memory(1)
    plan = memory.plan(core)
    for _ in range(2):
        with pytest.raises(kvasir.Refused):
            core.prefix([NAMESPACE], hashes([1]), 32)
    _, ok, here, _, error = load(core, plan, [1], [0])
    assert (ok, here) == (False, b"\0") and error is not None
    assert core.boot() == 0
