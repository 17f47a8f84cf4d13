"""`KvasirTier` under a view of memory of our own, with jobs written by hand.

An engine cannot run it here, as vLLM's OffloadingConnector wants a GPU.
"""

import hashlib
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CHUNKS, SIZE = 12, 8192


def spec(name="/models/tiny", groups=2, **parallel):
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    sizes |= {"rank": 0, "data_parallel_index": 0, "data_parallel_rank_local": None, "is_parallelism_agnostic": False}
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(32, (f"layer.{at}",), at) for at in range(groups)),
        worker_kv_bytes_per_block=SIZE,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name, "float16"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(**(sizes | parallel)),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config)


def made(settings, memory=None, **options):
    """A tier as vLLM's factory makes it, and the memory below it."""
    memory = np.zeros((CHUNKS, SIZE), np.int8) if memory is None else memory
    view = memoryview(memory)
    config = {"type": "KvasirTier", "module_path": "kvasir.vllm", **settings}
    return SecondaryTierFactory.create_secondary_tier(config, view, spec(**options)), memory, view


@pytest.fixture
def settings(host, request):
    return {"host": host.address, "model_id": request.node.name, "match_ms": 5000, "load_ms": 2000, "save_ms": 3000}


@pytest.fixture
def tier(settings):
    one = made(settings)
    yield one
    one[0].shutdown()


def key(word, group=0):
    return make_offload_key(hashlib.sha256(str(word).encode()).digest(), group)


def job(number, keys, chunks, load, request="r"):
    return TransferJob(number, keys, np.asarray(chunks), load, ReqContext(request))


def ended(tier):
    """Polls as vLLM does until every job has ended; no number comes twice."""
    results = {}
    while tier._parts or tier._finished:
        tier._poll.poll(50)
        for result in tier.get_finished_jobs():
            assert result.job_id not in results
            results[result.job_id] = result
    return results


def looked_up(tier, keys, request="r"):
    """Looks keys up over as many steps as it takes. The first answer is always to ask again."""
    context = ReqContext(request)
    tier.on_new_request(context)
    assert {tier.lookup(one, context) for one in keys} == {LookupResult.RETRY}
    found = [LookupResult.RETRY]
    while LookupResult.RETRY in found:
        tier.on_schedule_end(None)
        found = [tier.lookup(one, context) for one in keys]
    tier.on_request_finished(context)
    return [one is LookupResult.HIT for one in found]


def fill(memory, seed=1):
    memory[:] = np.random.default_rng(seed).integers(-128, 127, memory.shape, np.int8)
    return memory.copy()


def test_chunks_come_back_in_other_places(tier, settings):
    first, memory, _ = tier
    before = fill(memory)
    keys = [key(at, at % 2) for at in range(6)]
    first.submit_store(job(7, keys, range(6), False))
    done = ended(first)[7]
    assert done.success and done.transfer_bytes == 6 * SIZE
    second, other, _ = made(settings)
    assert looked_up(second, [*keys, key("no")]) == [True] * 6 + [False]
    second.submit_load(job(7, keys, range(11, 5, -1), True))
    assert ended(second)[7].success
    assert (other[11:5:-1] == before[:6]).all() and not other[:6].any()
    second.shutdown()


def test_groups_and_models_do_not_meet(tier, settings):
    first, memory, _ = tier
    fill(memory)
    first.submit_store(job(1, [key(1, 0)], [0], False))
    assert ended(first)[1].success
    assert looked_up(first, [key(1, 0), key(1, 1)]) == [True, False]
    for change in [{"model_id": "x"}, {"weights_version": "2"}, {"adapters_version": "2"}]:
        other, _, _ = made(settings | change)
        assert looked_up(other, [key(1, 0)]) == [False]
        other.shutdown()
    other, _, _ = made(settings, tp_size=2)
    assert looked_up(other, [key(1, 0)]) == [False]
    other.shutdown()


def test_a_part_of_a_load_is_kept(tier):
    one, memory, _ = tier
    before = fill(memory)
    keys = [key(at) for at in range(4)]
    one.submit_store(job(1, keys, range(4), False))
    ended(one)
    context = ReqContext("r2")
    one.on_new_request(context)
    while any(one.lookup(wanted, context) is not LookupResult.HIT for wanted in keys):
        one.on_schedule_end(None)
    one.core.remove(one.digests()[0], [keys[2][:32]])
    one.submit_load(job(2, keys, [8, 9, 10, 11], True, "r2"))
    done = ended(one)[2]
    assert not done.success and set(done.successful_keys) == {keys[0], keys[1], keys[3]}
    assert (memory[[8, 9, 11]] == before[[0, 1, 3]]).all()
    assert one.lookup(keys[2], context) is LookupResult.MISS, "or the same load would be asked for again"
    one.on_request_finished(context)


def test_a_load_that_fails_while_its_key_is_looked_up_again(tier):
    """The request that loads has ended, and another asks: the answer to it is still to come and must be taken."""
    one, memory, _ = tier
    fill(memory)
    one.submit_load(job(1, [key(1)], [0], True, "r1"))
    context = ReqContext("r2")
    one.on_new_request(context)
    assert one.lookup(key(1), context) is LookupResult.RETRY
    assert not ended(one)[1].success
    one.submit_store(job(2, [key(1)], [3], False, "r3"))
    assert ended(one)[2].success
    found = LookupResult.RETRY
    while found is LookupResult.RETRY:
        one.on_schedule_end(None)
        found = one.lookup(key(1), context)
    assert found is LookupResult.HIT
    one.on_request_finished(context)


def test_hashes_that_can_collide_are_not_used(tier):
    one, _memory, _ = tier
    short = make_offload_key(b"\1" * 16, 0)
    one.submit_store(job(1, [short, key(1)], [0, 1], False))
    assert not ended(one)[1].success
    assert looked_up(one, [short, key(1)]) == [False, True]
    assert looked_up(one, [key(1, 9)]) == [False], "a group that there is not"


def test_a_host_that_is_gone_is_a_miss_and_a_failed_job(settings, tmp_path):
    one, _memory, _ = made(settings | {"host": f"unix:{tmp_path}/none.sock"})
    assert looked_up(one, [key(1)]) == [False]
    one.submit_store(job(1, [key(1)], [0], False))
    one.submit_load(job(2, [key(1)], [0], True))
    done = ended(one)
    assert not done[1].success and not done[2].success and done[2].successful_keys is None
    one.shutdown()


def test_a_host_that_hangs_ends_the_drain_by_the_deadline(tier, host):
    one, memory, _ = tier
    fill(memory)
    one.submit_store(job(1, [key(1)], [0], False))
    ended(one)
    host.pause()
    one.submit_load(job(2, [key(1)], [1], True))
    one.drain_jobs()
    (done,) = one.get_finished_jobs()
    assert done.job_id == 2 and not done.success
    host.resume()


def test_a_reset_uses_other_keys_and_old_requests_store_nothing(tier):
    one, memory, _ = tier
    fill(memory)
    old = ReqContext("old")
    one.on_new_request(old)
    one.submit_store(job(1, [key(1)], [0], False))
    one.drain_jobs()
    assert [done.job_id for done in one.get_finished_jobs()] == [1]
    assert looked_up(one, [key(1)]) == [False]
    one.submit_store(job(2, [key(2)], [0], False, "old"))
    one.submit_store(job(3, [key(3)], [0], False, "new"))
    done = ended(one)
    assert not done[2].success and done[3].success
    assert looked_up(one, [key(2), key(3)], "another") == [False, True]
    one.on_request_finished(old)


def test_vllm_can_release_its_view(settings):
    one, _memory, view = made(settings)
    one.submit_store(job(1, [key(1)], [0], False))
    one.shutdown()
    view.release()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"model_id": ""}, "model_id"), ({"hots": 1}, "hots"), ({"save_share": 0.5}, "KvasirConnector")],
)
def test_settings_that_cannot_be_right_are_refused(settings, change, says):
    with pytest.raises(ValueError, match=says):
        made(settings | change)


def test_a_commit_is_not_enough(settings):
    """vLLM does not show a tier what quantises a snapshot, or overrides its configuration."""
    one = spec(f"/hub/models--org--m/snapshots/{'0' * 40}")
    config = {"type": "KvasirTier", "module_path": "kvasir.vllm", **settings, "model_id": ""}
    with pytest.raises(ValueError, match="model_id"):
        SecondaryTierFactory.create_secondary_tier(config, memoryview(np.zeros((CHUNKS, SIZE), np.int8)), one)


def test_memory_that_is_not_rows_of_bytes_is_refused(settings):
    for broken in [np.zeros((4, 4, 4), np.int8), np.zeros((4, 4), np.int64), np.zeros((8, 8), np.int8)[:, ::2]]:
        with pytest.raises(ValueError, match="rows of bytes"):
            made(settings, broken)
