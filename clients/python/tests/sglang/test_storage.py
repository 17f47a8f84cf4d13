"""The storage backend alone: several pools, ranks that share pages, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed: see clients/python/tests/sglang/install.sh")

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang_parts import PAGE, extra_config, fill, mha, mla, page, storage_config

from kvasir.sglang import KvasirStorage
from kvasir.sglang import keys as keys_module
from kvasir.sglang import storage as storage_module
from kvasir.sglang.pools import pages_of
from kvasir.sglang.settings import Settings

KEYS = [f"{number:064x}" for number in range(1, 9)]
PAGES = len(KEYS)
FIRST = torch.arange(PAGES * PAGE)
SECOND = FIRST + PAGES * PAGE

Start = Callable[..., KvasirStorage]


@pytest.fixture
def start(shared_host: Any, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Builds storage backends as SGLang does, with `pool` registered. No test hits another's pages."""
    made: list[KvasirStorage] = []

    def build(pool: Any, extra: dict[str, Any] | None = None, **config: Any) -> KvasirStorage:
        config = storage_config({**extra_config(shared_host.endpoint, model_id=request.node.nodeid), **(extra or {})}, **config)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        backend.register_mem_pool_host(pool)
        made.append(backend)
        return backend

    yield build
    for backend in made:
        backend.close()


def filled(make: Any = mha) -> Any:
    pool = make()[1]
    fill(pool)
    return pool


def equal(one: Any, other: Any) -> list[bool]:
    """Which pages of FIRST in one pool and SECOND in the other are equal."""
    return [torch.equal(page(one, int(FIRST[at])), page(other, int(SECOND[at]))) for at in range(0, len(FIRST), PAGE)]


# One pool.


def test_each_page_has_its_own_answer(start: Start) -> None:
    pool = filled()
    backend = start(pool)
    assert backend.batch_set_v1(KEYS, FIRST) == [True] * PAGES
    assert backend.batch_exists(KEYS) == PAGES and backend.exists(KEYS[3])
    gone = backend._core.remove(backend._pools["kv"].namespace, [bytes.fromhex(KEYS[3])])
    assert gone == b"\1"
    assert backend.batch_exists(KEYS) == 3 and not backend.exists(KEYS[3])
    others = [at != 3 for at in range(PAGES)]
    assert backend.batch_get_v1(KEYS, SECOND) == others
    assert equal(pool, pool) == others


def test_saving_again_is_true_and_moves_nothing(start: Start) -> None:
    backend = start(filled())
    assert all(backend.batch_set_v1(KEYS[:4], FIRST[: 4 * PAGE]))
    before = backend.counters()
    assert backend.batch_set_v1(KEYS[:4], FIRST[: 4 * PAGE]) == [True] * 4
    assert backend.counters()["save_blocks"] == before["save_blocks"]
    assert backend.batch_set_v1(KEYS, FIRST) == [True] * PAGES
    assert backend.counters()["save_blocks"] == before["save_blocks"] + PAGES - 4


@pytest.mark.parametrize(
    "indices",
    [FIRST[:-1], FIRST + 1, FIRST + 10**6, FIRST - PAGE, FIRST.flip(0), torch.empty(0, dtype=torch.int64)],
    ids=["too few", "across pages", "behind the pool", "before the pool", "backwards", "none"],
)
def test_indices_that_name_no_whole_pages_touch_nothing(start: Start, indices: torch.Tensor) -> None:
    pool = filled()
    backend = start(pool)
    assert all(backend.batch_set_v1(KEYS, FIRST))
    before = pool.kv_buffer.clone()
    assert backend.batch_get_v1(KEYS, indices) == [False] * PAGES
    assert backend.batch_set_v1(["ff" * 32] * PAGES, indices) == [False] * PAGES
    assert torch.equal(pool.kv_buffer, before) and not backend.exists("ff" * 32)


def test_keys_of_another_form_are_kept_apart(start: Start) -> None:
    backend = start(filled())
    assert backend.batch_set_v1(["a", "b"], FIRST[: 2 * PAGE]) == [True, True]
    assert backend.batch_exists(["a", "b", "c"]) == 2


def test_three_threads_of_one_rank(start: Start) -> None:
    pool = filled()
    backend = start(pool)
    wrong: list[str] = []

    def work(number: int) -> None:
        for round_ in range(30):
            keys = [f"{number * 1000 + round_:032x}{at:032x}" for at in range(2)]
            source = FIRST[number * 2 * PAGE : (number + 1) * 2 * PAGE]
            target = source + PAGES * PAGE
            ok = all(backend.batch_set_v1(keys, source)) and backend.batch_exists(keys) == 2
            if not ok or not all(backend.batch_get_v1(keys, target)):
                wrong.append(f"{number}.{round_}")
            elif not torch.equal(page(pool, int(source[0])), page(pool, int(target[0]))):
                wrong.append(f"{number}.{round_}: other bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_after_close_nothing_is_there_and_nothing_raises(start: Start) -> None:
    backend = start(filled())
    backend.batch_set_v1(KEYS, FIRST)
    backend.close()
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, SECOND) == [False] * PAGES
    assert backend.batch_set_v1(KEYS, FIRST) == [False] * PAGES


def test_clear_forgets_and_saves_anew(start: Start) -> None:
    backend = start(filled())
    backend.batch_set_v1(KEYS, FIRST)
    backend.clear()
    assert backend.batch_exists(KEYS) == 0
    assert all(backend.batch_set_v1(KEYS, FIRST)) and backend.batch_exists(KEYS) == PAGES


def test_a_thread_that_took_a_pool_before_clear_gets_nothing(start: Start) -> None:
    backend = start(filled())
    backend.batch_set_v1(KEYS, FIRST)
    taken = backend._pools["kv"]
    backend.clear()
    backend._pools["kv"] = taken
    assert backend.batch_get_v1(KEYS, SECOND) == [False] * PAGES
    assert backend.batch_set_v1(["ee" * 32], FIRST[:PAGE]) == [False]


def test_what_was_started_has_ended_when_a_later_pool_fails(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = start(filled())
    backend.batch_set_v1(KEYS, FIRST)
    started = []
    start_job = backend._jobs.start
    monkeypatch.setattr(backend._jobs, "start", lambda submit: started.append(start_job(submit)) or started[-1])
    good = PoolTransfer(name=PoolName.KV, keys=KEYS, host_indices=SECOND)
    with pytest.raises(AttributeError):
        backend.batch_get_v2([good, PoolTransfer(name=PoolName.KV, keys=KEYS, host_indices=object())])
    # In the same moment, as SGLang may free the pages.
    assert [future.done() for future in started] == [True]


def test_weights_that_change_in_place_end_hits_and_saves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = start(filled())
    backend.batch_set_v1(KEYS, FIRST)
    monkeypatch.setattr(storage_module, "engine_facts", lambda: {"weight_version": "step-2"})
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, SECOND) == [False] * PAGES
    assert backend.batch_set_v1(["ee" * 32], FIRST[:PAGE]) == [False]


def test_sglangs_metrics(start: Start) -> None:
    backend = start(filled(), enable_storage_metrics=True)
    backend.batch_set_v1(KEYS, FIRST)
    backend.batch_get_v1(KEYS, SECOND)
    stats = backend.get_stats()
    assert stats.backup_pgs == [PAGES] and stats.prefetch_pgs == [PAGES]
    assert stats.backup_bandwidth[0] > 0 and stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []


# What must not meet.

OTHER = [
    ("another model", {"model_id": "tests/tiny@2"}, {}),
    ("other weights", {"weights_version": "2"}, {}),
    ("another type", {"kv_dtype": "fp8_e5m2"}, {}),
    ("another TP rank", {}, {"tp_rank": 1, "tp_size": 2}),
    ("another PP rank", {}, {"pp_rank": 1, "pp_size": 2}),
    ("another CP rank", {}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
]


@pytest.mark.parametrize(("extra", "config"), [case[1:] for case in OTHER], ids=[case[0] for case in OTHER])
def test_what_differs_does_not_hit(start: Start, extra: dict[str, Any], config: dict[str, Any]) -> None:
    pool = filled()
    assert all(start(pool).batch_set_v1(KEYS, FIRST))
    other = start(pool, extra, **config)
    assert other.batch_exists(KEYS) == 0
    assert other.batch_get_v1(KEYS, SECOND) == [False] * PAGES


def test_another_release_of_sglang_does_not_hit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled()
    assert all(start(pool).batch_set_v1(KEYS, FIRST))
    monkeypatch.setattr(keys_module, "__version__", "0.0.1")
    assert start(pool).batch_exists(KEYS) == 0


@pytest.fixture
def adapters() -> Iterator[None]:
    """SGLang's settings of an engine that serves LoRA adapters."""
    with runtime_context.get_context().override_server_args(enable_lora=True):
        yield


@pytest.mark.usefixtures("adapters")
def test_adapters_without_a_version_turn_the_backend_off(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    backend = start(filled())
    assert '"adapters_version"' in caplog.text
    assert backend.batch_set_v1(KEYS, FIRST) == [False] * PAGES
    assert backend.batch_exists(KEYS) == 0


@pytest.mark.usefixtures("adapters")
def test_adapters_hit_pages_of_the_same_version(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    pool = filled()
    assert all(start(pool, {"adapters_version": "1"}).batch_set_v1(KEYS, FIRST))
    assert start(pool, {"adapters_version": "1"}).batch_exists(KEYS) == PAGES
    assert start(pool, {"adapters_version": "2"}).batch_exists(KEYS) == 0
    assert "adapters_version" not in "".join(record.message for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head", "layer_first"])
def test_another_layout_does_not_hit(start: Start, layout: str) -> None:
    assert all(start(filled()).batch_set_v1(KEYS, FIRST))
    assert start(mha(layout)[1]).batch_exists(KEYS) == 0


def test_pages_of_numbers_of_the_same_size_do_not_hit(start: Start) -> None:
    assert all(start(filled()).batch_set_v1(KEYS, FIRST))
    assert start(mha(dtype=torch.float16)[1]).batch_exists(KEYS) == 0


# Ranks that hold the same bytes.


def test_one_rank_writes_latent_pages_and_all_read_them(start: Start) -> None:
    one, other = filled(mla), filled(mla)
    writer = start(one, is_mla_model=True, tp_rank=0, tp_size=2)
    reader = start(other, is_mla_model=True, tp_rank=1, tp_size=2)
    assert reader.batch_set_v1(KEYS, FIRST) == [True] * PAGES
    assert reader.batch_exists(KEYS) == 0
    assert writer.batch_set_v1(KEYS, FIRST) == [True] * PAGES
    assert reader.batch_exists(KEYS) == PAGES
    assert all(reader.batch_get_v1(KEYS, SECOND)) and all(equal(one, other))


def test_a_draft_with_heads_is_not_shared_by_ranks_of_a_latent_model(start: Start) -> None:
    transfers = [PoolTransfer(name=PoolName.DRAFT, keys=KEYS, host_indices=FIRST)]
    hits = []
    for rank in range(2):
        backend = start(filled(mla), is_mla_model=True, tp_rank=rank, tp_size=2)
        backend.register_mem_host_pool_v2(filled(), PoolName.DRAFT)
        hits.append(backend.batch_get_v2(transfers)["draft"])
        assert all(backend.batch_set_v2(transfers)["draft"]) and all(backend.batch_get_v2(transfers)["draft"])
    assert hits == [[False] * PAGES] * 2


# Several pools.


def window(keys: list[str], indices: torch.Tensor | None = None) -> PoolTransfer:
    return PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=indices, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_a_window_is_restorable_where_all_its_pages_are(start: Start) -> None:
    backend = start(filled())
    backend.register_mem_host_pool_v2(filled(), PoolName.SWA)
    backend.batch_set_v1(KEYS, FIRST)
    # The window has two pages; those that end at length 3 and at length 6 were saved.
    for at in (1, 4):
        assert backend.batch_set_v2([window(KEYS[at : at + 2], FIRST[: 2 * PAGE])]) == {"swa": [True, True]}
    found = backend.batch_exists_v2(KEYS, [window(KEYS[-2:])])
    assert found.restorable_prefix_pages == [3, 6]
    assert found.kv_hit_pages == 6
    assert found.extra_pool_hit_pages == {"kv": PAGES, "swa": 6}


def test_a_pool_of_all_pages_shortens_the_prefix(start: Start) -> None:
    backend = start(filled())
    backend.register_mem_host_pool_v2(filled(), PoolName.INDEXER)
    backend.batch_set_v1(KEYS, FIRST)
    backend.batch_set_v2([PoolTransfer(name=PoolName.INDEXER, keys=KEYS[:5], host_indices=FIRST[: 5 * PAGE])])
    found = backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.INDEXER)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (5, {"kv": PAGES, "indexer": 5})
    missing = backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.MAMBA)])
    assert (missing.kv_hit_pages, missing.restorable_prefix_pages) == (0, [])


def test_pools_come_back_each_in_its_own_memory(start: Start) -> None:
    pools = {PoolName.SWA: filled(), PoolName.INDEXER: filled(mla)}
    backend = start(filled())
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    at = {name: PoolTransfer(name=name, keys=KEYS, host_indices=FIRST) for name in pools}
    to = {name: PoolTransfer(name=name, keys=KEYS, host_indices=SECOND) for name in pools}
    assert backend.batch_set_v2(list(at.values())) == {"swa": [True] * PAGES, "indexer": [True] * PAGES}
    assert backend.batch_get_v2(list(to.values())) == {"swa": [True] * PAGES, "indexer": [True] * PAGES}
    assert all(equal(pool, pool) == [True] * PAGES for pool in pools.values())
    assert backend.batch_get_v2([PoolTransfer(name=PoolName.MAMBA, keys=KEYS, host_indices=FIRST)]) == {"mamba": [False] * PAGES}


# Refusals: each says what to write.

REFUSED = [
    ({"interface_v1": 0}, {}, '"interface_v1": 1'),
    ({"model_id": ""}, {}, '"model_id"'),
    ({"host": ""}, {}, '"host"'),
    ({"host": "here"}, {}, "here"),
    ({"colour": 1}, {}, "colour"),
    ({"tenant": "a"}, {}, "'tenant'"),
    ({}, {"should_split_heads": True}, "tp_lcm_size"),
]


@pytest.mark.parametrize(("extra", "config", "says"), REFUSED)
def test_a_wrong_configuration_is_refused(start: Start, extra: dict[str, Any], config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        start(mha()[1], extra, **config)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT.upper(), f"{COMMIT}\n"])
def test_a_name_without_a_commit_is_refused(revision: str | None) -> None:
    settings = Settings(host="unix:/x")
    facts = {"model_path": "org/model", **({"revision": revision} if revision else {})}
    with pytest.raises(ValueError, match='"model_id"'):
        settings.model(facts)
    assert settings.model({**facts, "revision": COMMIT}) == f"org/model@{COMMIT}"
    assert Settings(host="unix:/x", model_id="mine@2").model(facts) == "mine@2"


def test_a_folder_is_refused_with_any_revision(tmp_path: Any) -> None:
    for path in (str(tmp_path), "/not/there", "s3://bucket/model", ""):
        with pytest.raises(ValueError, match='"model_id"'):
            Settings(host="unix:/x").model({"model_path": path, "revision": COMMIT})


def test_a_layout_without_addresses_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="MHATokenToKVPoolHost in layout page_unified"):
        start(mha("page_unified")[1])


def test_bytes_of_an_unknown_type_are_refused(start: Start) -> None:
    pool = mha(dtype=torch.uint8)[1]
    with pytest.raises(ValueError, match='"kv_dtype"'):
        start(pool)
    start(pool, {"kv_dtype": "fp8_e4m3"})


def irregular(**changes: Any) -> Any:
    """A pool of four pages of 64 B that says where they lie, with one thing wrong."""
    memory = torch.zeros(4, 64, dtype=torch.uint8)
    at = changes.pop("at", lambda page: memory.data_ptr() + 64 * page)
    piece = changes.pop("piece", lambda page: 64)

    def meta(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return [at(int(indices[0]))], [piece(int(indices[0]))]

    regular = {"size": 4, "page_size": 1, "layout": "x", "kv_buffer": memory, "get_page_buffer_meta": meta}
    return SimpleNamespace(**{**regular, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shared_allocation_domain": object()}, "move"),
        ({"logical_size": 8}, "ranks"),
        ({"size": 0}, "no pages"),
        ({"get_page_buffer_meta": None}, "no addresses"),
        ({"at": lambda page: 4096 * page * page}, "equal distances"),
        ({"at": lambda page: 4096 + 32 * page}, "equal distances"),
        ({"piece": lambda page: 64 + page}, "equal distances"),
        ({"at": lambda page: 4096 + 64 * page}, "does not hold"),
        ({"kv_buffer": None}, "does not hold"),
    ],
)
def test_a_pool_that_cannot_be_addressed_is_refused(changes: dict[str, Any], says: str) -> None:
    assert pages_of(irregular()).count == 4
    with pytest.raises(ValueError, match=says):
        pages_of(irregular(**changes))
