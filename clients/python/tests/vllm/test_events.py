"""KV cache events: what vLLM publishes of the blocks at the host."""

import random
import time
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

from engine import prompt
from rig import BLOCK, Rig, external
from vllm import envs
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvasir import Unavailable
from kvasir._core import Core
from kvasir.vllm import events
from kvasir.vllm.events import MEDIUM_KVASIR, Events

ALL = 192
BLOCKS = ALL // BLOCK


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    """vLLM publishes 64 bits of a hash unless it is told otherwise, and an engine that started has kept what it was told."""
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Published:
    """What the engine has published, in batches, as its readers see it."""

    def __init__(self) -> None:
        self.events = []

    def publish(self, batch) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        pass

    def of(self, kind, medium=MEDIUM_KVASIR):
        return [event for event in self.events if type(event) is kind and event.medium == medium]

    def hashes(self, kind):
        return [one for event in self.of(kind) for one in event.block_hashes]

    @property
    def there(self):
        """What a reader believes to be at the host: group and hash. No block is stored or removed twice in a row."""
        there = set()
        for event in self.events:
            if getattr(event, "medium", None) != MEDIUM_KVASIR:
                continue
            named = {(event.group_idx, one) for one in event.block_hashes}
            assert len(named) == len(event.block_hashes)
            if type(event) is BlockStored:
                assert there.isdisjoint(named)
                there |= named
            else:
                assert named <= there
                there -= named
        return there


def made(model, settings, **options):
    """An engine that publishes events, and what it publishes."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    rig = Rig(model, settings, kv_events_config=config, **options)
    published = rig.scheduler.kv_event_publisher = Published()
    return rig, published


def steps(rig, until):
    """Empty steps, as an engine with other requests would make them."""
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end, "it does not happen"
        rig.step()
        time.sleep(0.01)


def remove(rig, request, place, rank=0):
    """Another client removes a block of one rank from the host."""
    inner = rig.workers[rank].worker
    assert inner.core.remove(inner.digests[0], [bytes(request.block_hashes[place])]) == b"\1"


def test_off_is_nothing(model, settings):
    rig = Rig(model, settings)
    published = rig.scheduler.kv_event_publisher = Published()
    core = mock.Mock(wraps=rig.half.core)
    rig.half.core = core
    rig.ask(prompt(1))
    assert rig.half.events is None and rig.connector.take_events() == () and published.events == []
    assert not core.tiers.called and not core.removals.called
    off = SimpleNamespace(kv_events_config=KVEventsConfig(enable_kv_cache_events=False))
    assert Events.of(off, rig.kv, rig.half.frame, core) is None
    rig.shutdown()


@pytest.mark.parametrize("shape", [{}, {"ranks": 2}, {"ranks": 2, "replicas": 2}], ids=["one", "ranks", "replicas"])
def test_what_is_saved_is_announced_as_vllm_does_its_own(model, settings, shape):
    rig, published = made(model, settings, **shape)
    request = rig.ask(prompt(1))
    stored = published.of(BlockStored)
    assert published.hashes(BlockStored) == request.block_hashes[:BLOCKS]
    parents = dict(zip(request.block_hashes, [None, *request.block_hashes[:-1]], strict=True))
    told = []
    for event in stored:
        assert event.parent_block_hash == parents[event.block_hashes[0]]
        assert event.block_size == BLOCK and event.group_idx == 0 and event.lora_name is None
        assert event.kv_cache_spec_kind == "full_attention" and event.kv_cache_spec_sliding_window is None
        assert len(event.token_ids) == BLOCK * len(event.block_hashes) == BLOCK * len(event.extra_keys)
        told += event.token_ids
    assert told == prompt(1)[:ALL]
    assert set(published.hashes(BlockStored)) <= {
        one for event in published.of(BlockStored, "GPU") for one in event.block_hashes
    }, "one hash names a block on the GPU and at the host"
    assert not published.of(BlockRemoved)
    rig.shutdown()


def test_hashes_have_the_form_that_vllm_gives_them(model, settings, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    rig, published = made(model, settings)
    request = rig.ask(prompt(1), 1)
    short = [int.from_bytes(one[-8:], "big") for one in request.block_hashes[:BLOCKS]]
    assert published.hashes(BlockStored) == short
    remove(rig, request, 3)
    steps(rig, lambda: published.of(BlockRemoved))
    assert published.hashes(BlockRemoved) == [short[3]]
    rig.shutdown()


def test_a_block_is_announced_once(model, settings):
    rig, published = made(model, settings)
    rig.ask(prompt(1))
    rig.forget()
    assert external(rig, prompt(1)) == ALL
    for one in (rig.add(prompt(2)), rig.add(prompt(2))):
        rig.run()
        assert one.is_finished()
    assert len(published.there) == 2 * BLOCKS
    rig.shutdown()


def test_what_another_engine_has_stored_counts(model, settings):
    first, _ = made(model, settings)
    request = first.ask(prompt(1))
    second, published = made(model, settings)
    with mock.patch.object(second.half, "_ask", lambda hashes: 0):
        second.ask(prompt(1))
    assert published.hashes(BlockStored) == request.block_hashes[:BLOCKS]


def test_a_window_leaves_blocks_out(model, settings):
    """Each group is announced by itself; an event is a run of blocks with their own tokens."""
    rig, published = made(model, settings, window=64, blocks=48, max_num_batched_tokens=64)
    request = rig.ask(prompt(1, 400))
    place = {one: at for at, one in enumerate(request.block_hashes)}
    kinds = set()
    for event in published.of(BlockStored):
        kinds.add((event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window))
        first = place[event.block_hashes[0]]
        assert [place[one] for one in event.block_hashes] == list(range(first, first + len(event.block_hashes)))
        tokens = request.all_token_ids[first * BLOCK : (first + len(event.block_hashes)) * BLOCK]
        assert event.token_ids == tokens
        assert event.parent_block_hash == (request.block_hashes[first - 1] if first else None)
    assert kinds == {(0, "full_attention", None), (1, "sliding_window", 64)}
    inner = rig.workers[0].worker
    for group, one in published.there:
        assert inner.core.exists(inner.digests[group], bytes(one), 32) == b"\1"
    rig.shutdown()


def test_a_block_that_one_rank_could_not_store_is_not_announced(model, settings):
    rig, published = made(model, settings, ranks=2)
    inner = rig.workers[1].worker
    whole = inner.core

    def short(number, plan, hashes, size, blocks, **more):
        whole.save(number, plan, hashes[2 * size :], size, blocks[2 * 4 :], **more)

    inner.core = mock.Mock(wraps=whole)
    inner.core.save.side_effect = short
    request = rig.ask(prompt(1), 1)
    (event,) = published.of(BlockStored)
    assert event.block_hashes == request.block_hashes[2:BLOCKS]
    assert event.parent_block_hash == request.block_hashes[1]
    assert event.token_ids == prompt(1)[2 * BLOCK : ALL]
    rig.shutdown()


def test_what_only_another_host_has_is_not_announced(model, settings):
    """The host does not tell when that one lets it go."""
    rig, published = made(model, settings)
    rig.half.events.core = core = mock.Mock(wraps=rig.half.core)
    core.tiers.side_effect = lambda *_: b"\1\2\3\4\0\1"
    request = rig.ask(prompt(1), 1)
    assert published.hashes(BlockStored) == [*request.block_hashes[:3], request.block_hashes[5]]
    rig.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_removed_block_is_withdrawn_once(model, settings, rank):
    """Whichever rank's part is gone, the block is."""
    rig, published = made(model, settings, ranks=2)
    request = rig.ask(prompt(1))
    remove(rig, request, 2, rank)
    steps(rig, lambda: published.of(BlockRemoved))
    (event,) = published.of(BlockRemoved)
    assert event.block_hashes == [request.block_hashes[2]] and event.group_idx == 0
    remove(rig, request, 2, 1 - rank)
    remove(rig, request, 4, rank)
    steps(rig, lambda: len(published.of(BlockRemoved)) > 1)
    assert published.hashes(BlockRemoved) == [request.block_hashes[2], request.block_hashes[4]]
    rig.forget()
    rig.ask(prompt(1))
    assert len(published.there) == BLOCKS, "and announced again with the next save"
    rig.shutdown()


def test_what_left_before_it_was_announced_is_not(model, settings):
    """A reader would keep it for ever, as the host tells of it before it is known here."""
    rig, published = made(model, settings)
    request = rig.add(prompt(1), 1)
    original = rig.half.events.end

    def late(number):
        remove(rig, request, 0)
        rig.half.events._follow()
        original(number)

    with mock.patch.object(rig.half.events, "end", late):
        rig.run()
    assert request.block_hashes[0] not in published.hashes(BlockStored)
    assert published.hashes(BlockStored) == request.block_hashes[1:BLOCKS]
    rig.shutdown()


def test_evictions_are_withdrawn(model, settings, folder):
    """In a host with little room. What a reader believes in the end is what is there."""
    from host import Host

    small = folder / "events-small"
    small.mkdir()
    other = Host(small, pool="1MiB").start()
    try:
        rig, published = made(model, settings | {"host": other.address}, blocks=200, layers=8)
        inner = rig.workers[0].worker

        def there():
            return {one for _, one in published.there}

        seed = 0
        while not published.of(BlockRemoved):
            seed += 1
            assert seed < 400, "nothing is evicted"
            rig.forget()
            rig.ask(prompt(seed, 900), 1)
        steps(
            rig,
            lambda: all(inner.core.exists(inner.digests[0], bytes(one), 32) == b"\1" for one in there()),
        )
        assert there()
        rig.shutdown()
    finally:
        other.kill()


def test_another_host_has_nothing(model, settings, host):
    rig, published = made(model, settings)
    first = rig.ask(prompt(1))
    host.kill()
    rig.half.events._removals_at = 0.0
    rig.step()
    assert not published.of(BlockRemoved), "a host that is away may have everything when it is back"
    host.start()
    steps(rig, lambda: published.of(BlockRemoved))
    assert sorted(published.hashes(BlockRemoved)) == sorted(first.block_hashes[:BLOCKS]) and not published.there
    second = rig.ask(prompt(2))
    steps(rig, lambda: published.there)
    assert {one for _, one in published.there} == set(second.block_hashes[:BLOCKS])
    rig.shutdown()


def test_a_host_that_hangs_is_asked_later(model, settings, host):
    rig, published = made(model, settings | {"match_ms": 100})
    request = rig.add(prompt(1), 1)
    rig.half.events.core = core = mock.Mock(wraps=rig.half.core)
    core.tiers.side_effect = Unavailable("hangs")
    rig.run()
    assert core.tiers.called and not published.of(BlockStored)
    core.tiers.side_effect = None
    steps(rig, lambda: published.of(BlockStored))
    assert published.hashes(BlockStored) == request.block_hashes[:BLOCKS]
    host.pause()
    try:
        rig.half.events._removals_at = 0.0
        rig.step()
    finally:
        host.resume()
    assert not published.of(BlockRemoved)
    remove(rig, request, 1)
    steps(rig, lambda: published.of(BlockRemoved))
    assert published.hashes(BlockRemoved) == [request.block_hashes[1]]
    rig.shutdown()


def test_a_reset_withdraws_everything(model, settings, host):
    rig, published = made(model, settings)
    first = rig.ask(prompt(1), 1)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.step()
    assert published.hashes(BlockRemoved) == first.block_hashes[:BLOCKS] and not published.there
    host.pause()
    rig.add(prompt(2), 1)
    with mock.patch.object(rig.half, "_ask", lambda hashes: 0):
        rig.step()
    assert rig.half.events._saving
    rig.half.reset()
    host.resume()
    rig.run()
    assert not published.there, "a save of before the reset is under keys that are not used again"
    rig.shutdown()


def test_what_is_followed_is_bounded(model, settings, monkeypatch):
    monkeypatch.setattr(events, "ANNOUNCED_MAX", 8)
    rig, published = made(model, settings, ranks=2)
    asked = [rig.ask(prompt(seed), 1) for seed in range(3)]
    hashes = [one for request in asked for one in request.block_hashes[:BLOCKS]]
    assert published.hashes(BlockStored) == hashes
    assert published.hashes(BlockRemoved) == hashes[:-8], "the oldest first"
    inner = rig.half.events
    assert len(inner._announced) == 8 and len(inner._of_key) == 16
    assert not inner._saving and not inner._ended and inner._ended_blocks == 0
    rig.shutdown()


def test_what_waits_for_the_host_is_bounded(model, settings, monkeypatch):
    monkeypatch.setattr(events, "ENDED_MAX", 8)
    rig, published = made(model, settings)
    rig.half.events.core = core = mock.Mock(wraps=rig.half.core)
    core.tiers.side_effect = Unavailable("away")
    asked = [rig.ask(prompt(seed), 1) for seed in range(3)]
    core.tiers.side_effect = None
    steps(rig, lambda: published.of(BlockStored))
    assert published.hashes(BlockStored) == asked[2].block_hashes[:BLOCKS]
    rig.shutdown()


def test_removals_are_asked_rarely_and_only_for_something(model, settings):
    rig, published = made(model, settings)
    rig.half.events.core = core = mock.Mock(wraps=rig.half.core)
    for _ in range(50):
        rig.step()
    assert not core.removals.called
    start = time.monotonic()
    rig.ask(prompt(1))
    for _ in range(200):
        rig.step()
    # Twice each time: a page, and that there are no more.
    assert 0 < core.removals.call_count <= 2 * (1 + (time.monotonic() - start) / events.REMOVALS_SECONDS)
    assert published.there
    rig.shutdown()


class Old:
    """A host of a release that does not tell what leaves, and then another one at the same address."""

    def __init__(self) -> None:
        self.run = 1

    def boot(self):
        return self.run

    def removals(self, since):
        raise Unavailable("it speaks version 6")

    def tiers(self, namespace, hashes, hash_bytes):
        return b"\1" * (len(hashes) // hash_bytes)

    keys = staticmethod(Core.keys)


def test_an_old_host_is_announced_and_withdrawn_with_its_run(model, settings):
    rig, published = made(model, settings)
    rig.half.events.core = old = Old()
    request = rig.ask(prompt(1))
    assert published.hashes(BlockStored) == request.block_hashes[:BLOCKS] and not published.of(BlockRemoved)
    old.run = 2
    rig.step()
    assert published.hashes(BlockRemoved) == request.block_hashes[:BLOCKS]
    rig.shutdown()


def test_nothing_raises(model, settings, monkeypatch):
    rig, published = made(model, settings)

    def broken(*_):
        raise RuntimeError("for a test")

    rig.half.events.core = mock.Mock(wraps=rig.half.core, tiers=broken)
    assert rig.ask(prompt(1)).is_finished()
    monkeypatch.setattr(events, "generate_block_hash_extra_keys", broken)
    assert rig.ask(prompt(2)).is_finished()
    assert not published.there
    rig.shutdown()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events(model, settings, host, seed):
    """In the end a reader believes of no block that it is at the host when it is not, whatever happened in between."""
    chance = random.Random(seed)
    rig, published = made(model, settings, **([{}, {"ranks": 2}, {"window": 64, "blocks": 48}][seed % 3]))
    running = []

    def there(group, one):
        spaces = rig.half._namespaces[group]
        return all(rig.half.core.exists(space, bytes(one), 32) == b"\1" for space in spaces)

    for _ in range(60):
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                running.append(rig.add(prompt(chance.randrange(4), chance.choice([40, 96, 150, 230])), 5))
            case 4 if running:
                one = running.pop(chance.randrange(len(running)))
                if not one.is_finished():
                    rig.abort(one)
            case 5 | 6 if published.there:
                group, one = chance.choice(sorted(published.there))
                inner = rig.workers[chance.randrange(len(rig.workers))].worker
                space = chance.choice(rig.half._namespaces[group])
                inner.core.remove(space, [bytes(one)])
            case 7 if chance.random() < 0.3:
                rig.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
            case 8 if chance.random() < 0.4:
                host.kill()
                host.start()
            case 9:
                rig.scheduler.reset_prefix_cache()
        for _ in range(chance.randrange(1, 8)):
            rig.step()
    rig.run()
    rig.half.events._removals_at = 0.0
    steps(rig, lambda: all(there(group, one) for group, one in published.there))
    assert published.of(BlockStored) and published.of(BlockRemoved)
    inner = rig.half.events
    assert len(inner._announced) == len(published.there) and not inner._saving and not inner._ended
    rig.shutdown()
