"""What the connector promises vLLM, with vLLM's own classes and no engine."""

import pickle
import time
from unittest import mock

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

import torch
from engine import prompt
from rig import BLOCK, Rig, engine_config, external, kv_config, specs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, CrossAttentionSpec, MambaSpec

import kvasir.vllm
from kvasir import namespace
from kvasir.vllm.connector import KvasirConnector, check
from kvasir.vllm.geometry import Pages, model_identity, unsupported
from kvasir.vllm.messages import WorkerReport
from kvasir.vllm.scheduler import FREES_SECONDS
from kvasir.vllm.settings import Settings

ALL = 192
NOBODY = {"host": "unix:/nonexistent/kvasir.sock", "model_id": "tiny", "save_share": 1.0}


# Start


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host": ""}, "host"),
        ({"hots": "x"}, "hots"),
        ({"load_threads": "2"}, "load_threads"),
        ({"tenant": -1}, "tenant"),
        ({"verify": 1}, "verify"),
        ({"save_share": 0}, "save_share"),
        ({"save_share": 1.5}, "save_share"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        Settings.parse(NOBODY | change)


def test_the_token_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVASIR_TOKEN", "secret")
    assert Settings.parse(NOBODY).token == "secret"
    assert Settings.parse(NOBODY | {"token": "other"}).token == "other"


def made(model, settings=NOBODY, **options):
    config = engine_config(model, settings, **options)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config(24, specs(None)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "sha256"),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256"),
        ({"transfer": {"kv_load_failure_policy": "fail"}}, "recompute"),
        ({"transfer": {"kv_role": "kv_producer"}}, "kv_both"),
        ({"settings": {"host": "unix:/x"}}, "model_id"),
        ({"settings": NOBODY | {"hsot": "x"}}, "hsot"),
    ],
)
def test_it_refuses_to_start_where_output_could_be_wrong(model, options, says):
    with pytest.raises(ValueError, match=says):
        made(model, **options)


def test_adapters_have_a_version(model):
    config = engine_config(model, NOBODY)
    config.lora_config = mock.Mock()
    with pytest.raises(ValueError, match="adapters_version"):
        check(config, Settings.parse(NOBODY))
    check(config, Settings.parse(NOBODY | {"adapters_version": "3"}))


def test_it_starts_for_memory_that_it_reaches(model):
    config = engine_config(model, NOBODY)
    for device in ["cpu", "cuda"]:
        config.device_config.device_type = device
        check(config, Settings.parse(NOBODY))
    config.device_config.device_type = "xpu"
    with pytest.raises(ValueError, match=r"'xpu'.*KvasirTier"):
        check(config, Settings.parse(NOBODY))


def test_a_token_is_not_shown():
    assert "secret" not in repr(Settings.parse(NOBODY | {"token": "secret"}))
    with pytest.raises(ValueError, match="token") as refused:
        Settings.parse(NOBODY | {"token": 4711})
    assert "4711" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_it_starts_with_nobody_there(model, algorithm):
    connector = made(model, prefix_caching_hash_algo=algorithm)
    assert supports_hma(connector) and not connector.requires_kv_delivery
    connector.shutdown()


def test_fail_can_be_allowed(model):
    made(model, NOBODY | {"allow_fail": True}, transfer={"kv_load_failure_policy": "fail"}).shutdown()


def test_a_device_without_cuda_is_sent_to_the_tier(model):
    config = engine_config(model, NOBODY)
    config.device_config.device_type = "xpu"
    with pytest.raises(ValueError, match="KvasirTier"):
        KvasirConnector(config, KVConnectorRole.SCHEDULER, kv_config(24, specs(None)))


# Which models, and whose blocks


def test_models_whose_blocks_depend_on_more_than_tokens_are_left_alone(model):
    config = engine_config(model, NOBODY)
    common = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert unsupported(config, kv_config(24, specs(64))) is None
    for spec, says in [
        (MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,)), "MambaSpec"),
        (ChunkedLocalAttentionSpec(**common, attention_chunk_size=64), "ChunkedLocal"),
        (CrossAttentionSpec(**common), "CrossAttention"),
    ]:
        assert says in unsupported(config, kv_config(24, [*specs(None), spec]))
    drafted = kv_config(24, specs(None))
    drafted.kv_cache_groups[0].is_eagle_group = True
    assert "draft" in unsupported(config, drafted)
    config.cache_config.cache_dtype = "int8_per_token_head"
    assert "scales" in unsupported(config, kv_config(24, specs(None)))


def test_an_unsupported_model_runs_as_if_there_were_no_connector(model, settings):
    with mock.patch("kvasir.vllm.scheduler.unsupported", return_value="for a test"):
        rig = Rig(model, settings)
    assert external(rig, prompt(1)) == 0
    rig.forget()
    assert external(rig, prompt(1)) == 0
    assert not rig.half.ready


def test_a_path_is_no_identity(model):
    config = engine_config(model, NOBODY)
    with pytest.raises(ValueError, match="model_id"):
        model_identity(config, Settings.parse({"host": "unix:/x"}))
    config.model_config.model = f"/hub/models--org--name/snapshots/{'a1' * 20}"
    assert model_identity(config, Settings.parse({"host": "unix:/x"}))["commit"] == "a1" * 20


def test_each_worker_property_is_in_its_namespace(model):
    """What differs between two engines must differ in the digests, and `explain` names it."""

    def fields(settings=NOBODY, window=None, **options):
        rig = Rig(model, settings, window=window, **options)
        try:
            return rig.workers[-1].worker.fields[-1]
        finally:
            rig.shutdown()

    base = fields()
    for other, says in [
        (fields(NOBODY | {"model_id": "x"}), "model.id"),
        (fields(NOBODY | {"weights_version": "2"}), "model.weights_version"),
        (fields(prefix_caching_hash_algo="sha256_cbor"), "hash.algorithm"),
        (fields(ranks=2), "shard.tp_size"),
        (fields(window=64), "group.window"),
        (fields(hf_overrides={"rope_theta": 5000.0}), "model.architecture"),
        (fields(kv_cache_dtype="fp8"), "kv_dtype"),
    ]:
        assert namespace.digest(base) != namespace.digest(other)
        assert any(line.startswith(says) for line in namespace.explain(base, other)), says


def test_pages_are_whole_or_refused():
    memory = torch.zeros((8, 1, 4, 2))
    pages = Pages({"a": memory, "b": memory}, ["a", "b"], 8)
    assert len(pages.runs) == 24, "layers that share their cache are one run"
    assert len(Pages({"a": memory}, ["a"], 4).runs) == 24, "a block of two kernel blocks"
    for broken in [memory[:, :, ::2], memory.transpose(0, 2), memory.to("meta"), [memory]]:
        with pytest.raises(ValueError, match="layer a"):
            Pages({"a": broken}, ["a"], 8)


# Matches, loads and saves


@pytest.mark.parametrize("shape", [{}, {"ranks": 2}, {"ranks": 2, "replicas": 2}, {"window": 64, "blocks": 48}])
def test_saved_blocks_are_found_and_right(model, settings, shape):
    rig = Rig(model, settings, **shape)
    assert external(rig, prompt(1)) == 0
    rig.forget()
    assert external(rig, prompt(1)) == ALL
    rig.forget()
    rig.ask(prompt(1)[: 3 * BLOCK] + [9] * 8)
    assert external(rig, prompt(1)) == ALL - 3 * BLOCK
    rig.shutdown()


def test_another_engine_finds_them(model, settings):
    first, second = Rig(model, settings), Rig(model, settings)
    first.ask(prompt(1))
    assert external(second, prompt(1)) == ALL


def test_a_rank_that_is_missing_means_no_hits(model, settings):
    rig = Rig(model, settings, ranks=2)
    rig.ask(prompt(1))
    other = Rig(model, settings, ranks=2)
    other.half._namespaces = []
    said = other.handshakes()
    del said[(0, 1)]
    other.connector.set_xfer_handshake_metadata_pp_aware(said)
    assert external(other, prompt(1)) == 0


def test_a_block_that_one_rank_lacks_is_no_hit(model, settings):
    rig = Rig(model, settings, ranks=2)
    request = rig.ask(prompt(1))
    rig.forget()
    inner = rig.workers[1].worker
    inner.core.remove(inner.digests[0], [bytes(request.block_hashes[2])])
    assert external(rig, prompt(1)) == 2 * BLOCK


@pytest.mark.parametrize("shape", [{"ranks": 2}, {"ranks": 2, "window": 64, "blocks": 48}])
def test_a_load_that_fails_on_one_rank_is_computed(model, settings, shape):
    """With one group vLLM hears of blocks, with several of the request; both ends well."""
    rig = Rig(model, settings, **shape)
    request = rig.ask(prompt(1))
    rig.forget()
    inner = rig.workers[1].worker
    hashes = [bytes(one) for one in request.block_hashes]
    original = rig.half._ask

    def gone(asked):
        tokens = original(asked)
        inner.core.remove(inner.digests[0], [hashes[3]])
        return tokens

    with mock.patch.object(rig.half, "_ask", gone):
        assert external(rig, prompt(1)) == ALL
    rig.forget()
    assert external(rig, prompt(1)) == ALL, "what was missing has been saved again"


def test_a_match_is_remembered_while_a_request_waits(model, settings):
    rig = Rig(model, settings)
    rig.ask(prompt(1))
    rig.forget()
    request = rig.add(prompt(1))
    before = rig.half.counts["match_queries"]
    for _ in range(50):
        assert rig.connector.get_num_new_matched_tokens(request, 0) == (ALL, True)
        assert rig.connector.get_num_new_matched_tokens(request, BLOCK) == (ALL - BLOCK, True)
    assert rig.half.counts["match_queries"] - before == 1
    rig.run()


def test_a_promise_that_is_never_kept_is_not_believed_for_ever(model, settings):
    """A host that says it has what it has not. vLLM, left with nothing of the hit, asks again."""
    rig = Rig(model, settings)
    with mock.patch.object(rig.half, "_ask", lambda hashes: len(hashes) * BLOCK):
        request = rig.add(prompt(1))
        rig.run(limit=500)
    assert request.is_finished() and request.num_output_tokens == 4


def test_saves_hold_no_more_than_their_share(model, settings, host):
    rig = Rig(model, settings | {"save_share": 0.25})
    rig.ask(prompt(0))
    host.pause()
    requests = [rig.add(prompt(seed, 150), 60) for seed in (1, 2, 3)]
    for _ in range(30):
        rig.step()
        assert rig.half._held <= 6
    assert rig.half._held > 0
    host.resume()
    rig.run()
    assert all(request.is_finished() for request in requests)


def test_waiting_for_saves_instead_of_preempting(model, settings, host):
    """Only where a save alone holds a block, and not for one that hangs."""
    rig = Rig(model, settings)
    rig.ask(prompt(0))
    rig.forget()
    assert not rig.connector.has_pending_block_frees()
    host.pause()
    request = rig.add(prompt(1, 70), 2)
    rig.step()
    assert rig.connector.has_pending_push_work()
    assert not rig.connector.has_pending_block_frees(), "the request holds the blocks as well"
    rig.abort(request)
    for hold in rig.half._holds.values():
        hold.since = time.monotonic() + 60
    assert rig.connector.has_pending_block_frees()
    for hold in rig.half._holds.values():
        hold.since = time.monotonic() - FREES_SECONDS
    assert not rig.connector.has_pending_block_frees(), "a save that hangs is not waited for"
    host.resume()
    rig.run()


def test_short_names_are_registered_once():
    kvasir.vllm.register()
    kvasir.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KvasirConnector") is KvasirConnector


def test_reports_of_workers_add_up():
    one = WorkerReport({1: 1, 2: 1}, {"a"}, {"c"}, {2})
    other = WorkerReport({2: 1, 3: 1}, {"b"}, {"d"}, {3})
    assert one.aggregate(other) == WorkerReport({1: 1, 2: 2, 3: 1}, {"a", "b"}, {"c", "d"}, {2, 3})


def test_messages_hold_byte_strings_only(model, settings):
    """What is pickled for every worker on every step grows by bytes, not by objects."""
    rig = Rig(model, settings, blocks=200)
    rig.ask(prompt(1, 64))
    seen = []
    original = rig.half.build

    def keep(output):
        step = original(output)
        seen.append(step)
        return step

    with mock.patch.object(rig.half, "build", keep):
        rig.ask(prompt(2, 256))
    (job,) = next(step for step in seen if step.saves).saves
    assert len(job.hashes) == 8 * 32 and len(job.blocks) == 8 * 4
    assert len(pickle.dumps(seen[0])) < 8 * 36 + 500


def test_namespaces_can_be_asked_twice_and_shutdown_too(model, settings):
    rig = Rig(model, settings)
    rig.connector.set_xfer_handshake_metadata_pp_aware(rig.handshakes())
    rig.ask(prompt(1))
    rig.shutdown()
    rig.shutdown()
