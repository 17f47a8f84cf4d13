"""The conditions under which wrong KV is impossible, each with what happens where it does not hold.

Every test first shows the rule at work and then takes it away: the model of `rig` then reads KV that is not its own.
"""

import random
from unittest import mock

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

from engine import prompt
from rig import BLOCK, Fault, Rig, WrongKV, answered, external

from kvasir.vllm.geometry import group_namespace
from kvasir.vllm.scheduler import SchedulerHalf
from kvasir.vllm.worker import WorkerHalf

ALL = 192


def test_1_hashes_must_not_collide(model, settings):
    """A 32-bit hash, stretched: with enough prompts two blocks share one. Refused at start by its name."""

    def weak(value):
        return (hash(repr(value)) % 40).to_bytes(32, "little")

    rig = Rig(model, settings, hash_function=weak)
    with pytest.raises(WrongKV):
        for seed in range(40):
            rig.ask(prompt(seed, 70))
            rig.forget()


def test_2_a_namespace_is_part_of_the_key(model, settings):
    """Two versions of the weights, two namespaces. Without that field the second engine reads the first one's KV."""
    Rig(model, settings).ask(prompt(1))
    assert external(Rig(model, settings | {"weights_version": "2"}, weights=2), prompt(1)) == 0

    def without(*arguments):
        return {**group_namespace(*arguments), "model": {"id": "any"}}

    with mock.patch("kvasir.vllm.worker.group_namespace", without):
        Rig(model, settings).ask(prompt(1))
        other = Rig(model, settings | {"weights_version": "2"}, weights=2)
        with pytest.raises(WrongKV):
            other.ask(prompt(1))


def test_2_the_shard_is_part_of_the_key(model, settings):
    """Two ranks hold other heads of the same tokens."""
    rig = Rig(model, settings, ranks=2)
    rig.ask(prompt(1))
    rig.forget()
    assert external(rig, prompt(1)) == ALL

    def without(*arguments):
        return {**group_namespace(*arguments), "shard": {}}

    with mock.patch("kvasir.vllm.worker.group_namespace", without):
        rig = Rig(model, settings, ranks=2)
        rig.ask(prompt(1))
        rig.forget()
        with pytest.raises(WrongKV):
            rig.ask(prompt(1))


def test_2_the_group_is_part_of_the_key(model, settings):
    def without(*arguments):
        return {**group_namespace(*arguments), "group": {}, "pages": {}}

    with mock.patch("kvasir.vllm.worker.group_namespace", without):
        rig = Rig(model, settings, window=64, blocks=48)
        rig.ask(prompt(1))
        rig.forget()
        with pytest.raises(WrongKV):
            rig.ask(prompt(1))


def save_while_blocks_change_hands(rig, host):
    """The host hangs while a prompt is saved; its request ends, and others need the room."""
    rig.ask(prompt(99, 20))
    host.pause()
    rig.add(prompt(1), 1)
    for _ in range(3):
        rig.step()
    others = [rig.add(prompt(seed, 230), 1) for seed in (2, 3, 4)]
    for _ in range(12):
        rig.step()
    host.resume()
    for request in others:
        if not request.is_finished():
            rig.abort(request)
    for _ in range(2000):
        if not rig.worker_jobs():
            break
        rig.step()
    rig.scheduler.reset_prefix_cache()


class Watched(Rig):
    def worker_jobs(self):
        return any(worker.worker._running for worker in self.workers)


def test_3_saves_refer_to_their_blocks(model, settings, host):
    rig = Watched(model, settings)
    save_while_blocks_change_hands(rig, host)
    rig.run()
    rig.forget()
    answered(rig)
    assert external(rig, prompt(1)) == ALL

    def without(self, job):
        pass

    with mock.patch.object(SchedulerHalf, "_refer", without):
        rig = Watched(model, settings | {"model_id": "without"})
        save_while_blocks_change_hands(rig, host)
        with pytest.raises(WrongKV):
            rig.ask(prompt(1))


def test_3_only_computed_blocks_are_saved(model, settings):
    """Blocks that a step is not yet to compute have hashes already, as all of the prompt has."""
    rig = Rig(model, settings)
    rig.ask(prompt(1, 400))
    rig.forget()
    assert external(rig, prompt(1, 400)) == 384
    original = SchedulerHalf._save

    def too_early(self, tracked, scheduled, output, saves):
        return original(self, tracked, scheduled + BLOCK, output, saves)

    with mock.patch.object(SchedulerHalf, "_save", too_early):
        rig = Rig(model, settings | {"model_id": "too early"}, max_num_batched_tokens=240)
        step, worker = rig.step, rig.workers[0].worker

        def after_its_saves():
            """So that none is so late that the next step has computed its blocks after all."""
            step()
            if worker._running:
                worker._poll.poll(5000)

        rig.step = after_its_saves
        with pytest.raises(WrongKV):
            for _ in range(2):
                rig.ask(prompt(1, 400))
                rig.forget()


def test_3_a_step_that_fails_saves_nothing(model, settings, monkeypatch):
    """vLLM asks for the step's saves in a `finally`, when what was computed is unknown."""

    def failed(rig):
        def fail(layer):
            raise Fault

        rig.after_layer = fail
        rig.ask(prompt(1), 1)
        rig.after_layer = lambda layer: None
        rig.forget()
        return rig

    rig = failed(Rig(model, settings, layers=2))
    rig.ask(prompt(1))
    rig.forget()
    assert external(rig, prompt(1)) == ALL, "what a step after that computed is saved"

    monkeypatch.setattr(WorkerHalf, "drop_saves", WorkerHalf.start_saves)
    rig = failed(Rig(model, settings | {"model_id": "careless"}, layers=2))
    with pytest.raises(WrongKV):
        rig.ask(prompt(1))


def test_5_a_failed_load_is_not_believed(model, settings):
    """What a job did not bring is reported as missing. Taken as there, the blocks hold what they held before."""
    rig = Rig(model, settings)
    request = rig.ask(prompt(1))
    rig.forget()
    gone = bytes(request.block_hashes[2])

    def vanish(rig):
        inner = rig.workers[0].worker
        original = rig.half._ask

        def ask(hashes):
            tokens = original(hashes)
            inner.core.remove(inner.digests[0], [gone])
            return tokens

        return mock.patch.object(rig.half, "_ask", ask)

    with vanish(rig):
        assert external(rig, prompt(1)) == ALL
    rig.forget()
    inner = rig.workers[0].worker
    original = inner._loaded

    def believed(running, ok, here, copied, epoch, finished):
        return original(running, True, b"\1" * len(here), copied, epoch, finished)

    with vanish(rig), mock.patch.object(inner, "_loaded", believed), pytest.raises(WrongKV):
        rig.ask(prompt(1))


def test_6_a_reset_changes_the_keys(model, settings):
    rig = Rig(model, settings)
    rig.ask(prompt(1))
    rig.weights = 5
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert external(rig, prompt(1)) == 0
    rig.forget()
    assert external(rig, prompt(1)) == ALL
    rig.weights = 6
    with mock.patch.object(SchedulerHalf, "reset", lambda self: True):
        assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    with pytest.raises(WrongKV):
        rig.ask(prompt(1))


def test_6_what_runs_over_a_reset_is_not_saved(model, settings):
    """A request that goes on with KV of before the reset; the new keys are for new KV."""

    def run_over(rig):
        request = rig.add(prompt(1, 250), 40)
        while request.num_computed_tokens < 250:
            rig.step()
        # Weights stay as they are for the request under way: vLLM lets it end with the KV that it has.
        rig.connector.reset_cache()
        rig.run()
        rig.forget()
        return rig

    rig = run_over(Rig(model, settings))
    rig.weights = 5
    assert external(rig, prompt(1, 250)) == 0
    original = SchedulerHalf.reset

    def careless(self):
        result = original(self)
        self._unclean = False
        for tracked in self._tracked.values():
            tracked.old = False
        return result

    with mock.patch.object(SchedulerHalf, "reset", careless):
        rig = run_over(Rig(model, settings | {"model_id": "careless"}))
        rig.weights = 5
        with pytest.raises(WrongKV):
            rig.ask(prompt(1, 250))


def test_6_a_reset_that_vllm_refused_brings_no_old_kv_under_new_keys(model, settings):
    """vLLM calls the connector although its own reset failed, and goes on with the blocks that it has cached."""

    def refused(rig):
        rig.ask(prompt(1))
        rig.add(prompt(2), 40)
        rig.step()
        assert not rig.scheduler.reset_prefix_cache(reset_connector=True), "a request is running"
        rig.run()
        rig.ask(prompt(1))
        rig.weights = 5
        rig.forget()
        return rig

    rig = refused(Rig(model, settings))
    assert external(rig, prompt(1)) == 0
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.ask(prompt(1))
    rig.forget()
    assert external(rig, prompt(1)) == ALL, "a clean reset ends it"
    with mock.patch("kvasir.vllm.scheduler._keeps_kv", lambda pool: False):
        rig = refused(Rig(model, settings | {"model_id": "careless"}))
        with pytest.raises(WrongKV):
            rig.ask(prompt(1))


def test_6_a_load_under_way_over_a_reset_is_computed(model, settings, host):
    rig = Rig(model, settings)
    rig.ask(prompt(1))
    rig.forget()
    host_waits = mock.patch.object(rig.half, "_hold_at_host", lambda *_: host.pause())
    with host_waits:
        rig.add(prompt(1))
        rig.step()
    rig.weights = 5
    assert rig.connector.reset_cache() is False
    host.resume()
    rig.run()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [{}, {"ranks": 2}, {"window": 64, "blocks": 40}], ids=["one", "ranks", "window"])
def test_any_order_of_events(model, settings, host, shape, seed):
    """Requests, aborts, preemptions, resets, and a host that hangs, dies and comes back, in an order drawn at random."""
    chance = random.Random(seed)
    rig = Rig(model, settings | {"match_ms": 50, "load_ms": 200, "save_ms": 400, "save_share": 0.5}, **shape)
    running = []
    for _ in range(60):
        match chance.randrange(12):
            case 0 | 1 | 2 | 3:
                tokens = prompt(chance.randrange(4), chance.choice([40, 96, 150, 230, 300]))
                running.append(rig.add(tokens, chance.choice([1, 5, 60])))
            case 4 if running:
                one = running.pop(chance.randrange(len(running)))
                if not one.is_finished():
                    rig.abort(one)
            case 5:
                rig.scheduler.reset_prefix_cache()
            case 6 if chance.random() < 0.3:
                rig.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
            case 7 if chance.random() < 0.4:
                host.pause()
            case 8:
                host.resume()
            case 9 if chance.random() < 0.3:
                host.kill()
                host.start()
        for _ in range(chance.randrange(1, 8)):
            if rig.scheduler.has_requests():
                rig.step()
    host.resume()
    rig.run()
    assert rig.reads > 1000
    rig.shutdown()
