"""From which tier blocks would come, and which have left."""

from collections.abc import Callable

import pytest
from cluster import until
from daemon import Host
from engine import NAMESPACE, wait

import kvasir
from kvasir._core import Core


def _core(host: Host, tenant: int = 0) -> Core:
    return Core(host.unix, tenant=tenant, match_ms=10_000, load_ms=30_000)


def _follow(core: Core, since: int) -> tuple[int, set[bytes]]:
    gone: set[bytes] = set()
    while True:
        after, lost, keys = core.removals(since)
        assert not lost
        gone.update(keys)
        if after == since:
            return since, gone
        since = after


def test_a_block_comes_from_the_pool_or_from_nowhere(host: Host) -> None:
    core = _core(host)
    core.save_from(1, NAMESPACE, [b"a"], [b"bytes"])
    assert wait(core)[0][1]
    assert core.tiers(NAMESPACE, b"ab", 1) == b"\1\0"
    with pytest.raises(ValueError, match="whole number"):
        core.tiers(NAMESPACE, b"abc", 2)


def test_what_has_left_is_known_by_its_key_and_to_its_tenant(host: Host) -> None:
    cores = [_core(host, tenant) for tenant in (1, 2)]
    positions = []
    for core in cores:
        position, lost, keys = core.removals(0)
        assert lost and not keys
        positions.append(position)
        core.save_from(1, NAMESPACE, [b"a", b"b"], [b"bytes", b"others"])
        assert wait(core)[0][1]
    assert cores[0].remove(NAMESPACE, [b"b", b"c"]) == b"\1\0"
    key_a, key_b = Core.keys(NAMESPACE, b"ab", 1)
    assert len(key_a) == 16 and key_a != key_b
    at, gone = _follow(cores[0], positions[0])
    assert gone == {key_b} and _follow(cores[0], at)[1] == set()
    assert _follow(cores[1], positions[1])[1] == set()


def test_another_run_has_lost_everything(start_host: Callable[..., Host]) -> None:
    host = start_host()
    core = _core(host)
    position, _, _ = core.removals(0)
    assert core.removals(position) == (position, False, [])
    host.stop()
    with pytest.raises(kvasir.Unavailable):
        core.removals(position)
    host.start()
    other = _core(host)
    after, lost, keys = other.removals(position)
    assert lost and not keys and after != position


def test_a_question_for_a_metric_holds_up_no_other(host: Host) -> None:
    core = Core(host.unix, match_ms=50)
    until("the host answers", lambda: _answers(core))
    failed = core.counters()["questions_failed"]
    host.hang()
    with pytest.raises(kvasir.Unavailable):
        core.tiers(NAMESPACE, b"a", 1)
    assert core.counters()["questions_failed"] == failed
    with pytest.raises(kvasir.Unavailable):
        core.exists(NAMESPACE, b"a", 1)
    assert core.counters()["questions_failed"] == failed + 1, "it was asked"


def _answers(core: Core) -> bool:
    try:
        return core.exists(NAMESPACE, b"a", 1) == b"\0"
    except kvasir.Unavailable:
        return False
