"""The connector in a real vLLM engine: whatever happens to the host, the output stays what it would be without it.

One engine runs all cases; an engine without a connector, in another process, says what is right.
"""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

from engine import BLOCK, Engine, prompt

ALL = 192
"""Tokens in whole blocks of a prompt of 200."""
CASES = 16
GROWING = [prompt(100 + at, 150) for at in range(4)]


def settings(host):
    # Saves may hold every block, so that a test need not know when one was left out.
    return {
        "host": host.address,
        "model_id": "tiny",
        "save_share": 1.0,
        "match_ms": 5000,
        "load_ms": 5000,  # a step of a busy machine takes longer than one second
        "save_ms": 3000,
    }


@pytest.fixture(scope="module")
def right(elsewhere):
    """What an engine without a connector generates for the prompts of the cases."""
    return elsewhere([prompt(seed) for seed in range(CASES)])


@pytest.fixture(scope="module")
def right_growing(elsewhere):
    return elsewhere(GROWING, tokens=120, blocks=64)


@pytest.fixture(scope="module")
def engine(model, host):
    one = Engine(model, settings(host))
    one.count()
    return one


@pytest.fixture
def alive(engine, host):
    """The engine with a host that answers, whatever the test before did to it."""
    if not host.alive:
        host.kill()
        host.start()
    reach(engine)
    return engine


def reach(engine):
    """Asks until the host is found: after a failure it is asked for a while only now and then."""
    import time

    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            engine.half.core.prefix([bytes(32)], bytes(32), 32)
            engine.worker.core.prefix([bytes(32)], bytes(32), 32)
            return
        except Exception:
            time.sleep(0.05)
    raise AssertionError("the host is not found again")


def stored(engine, seed, right):
    """Computes a prompt, so that the host has its blocks, and empties vLLM's cache."""
    (cold,) = engine.ask(prompt(seed))
    assert cold.cached == 0
    cold.same_as(right[seed])
    engine.forget()


def test_cold_then_all_external(alive, right):
    stored(alive, 0, right)
    (hit,) = alive.ask(prompt(0))
    assert hit.cached == ALL
    hit.same_as(right[0])


def test_full_blocks_only_prompt(alive, right, elsewhere):
    """A prompt of whole blocks: all of it is loaded, and the last token computed again, as after a hit of vLLM's own."""
    exact = prompt(0, ALL)
    alive.ask(exact)
    # Not with the first answer: a step of one token is rounded otherwise than a step of all.
    (local,) = alive.ask(exact)
    alive.forget()
    (again,) = alive.ask(exact)
    assert again.cached >= ALL - BLOCK
    again.same_as(vars(local))


def test_half_local_half_external(alive, right):
    stored(alive, 1, right)
    alive.ask(prompt(1)[: 3 * BLOCK] + [9] * 8)
    before = alive.counts()
    (hit,) = alive.ask(prompt(1))
    assert hit.cached == ALL
    assert alive.counts()["hit_tokens"] - before["hit_tokens"] == ALL - 3 * BLOCK
    hit.same_as(right[1])


def test_generated_blocks_are_saved_too(alive, right):
    (first,) = alive.ask(prompt(2, 60), tokens=40)
    turn = prompt(2, 60) + first.tokens + [11, 12, 13]
    alive.forget()
    before = alive.counts().get("hit_tokens", 0)
    (second,) = alive.ask(turn)
    # 60 and 40 tokens are three whole blocks, of which the last two hold generated tokens.
    assert alive.counts()["hit_tokens"] - before == 3 * BLOCK
    assert second.cached == 3 * BLOCK


def test_a_second_engine_process(alive, right, elsewhere, host):
    stored(alive, 3, right)
    (other,) = elsewhere([prompt(3)], settings(host))
    assert other["cached"] == ALL, "the blocks of another process are found"
    assert (other["tokens"], other["logprobs"]) == (right[3]["tokens"], right[3]["logprobs"])


def test_another_model_id_finds_nothing(alive, right, elsewhere, host):
    """The namespace at work: the same tokens, another model, no hit."""
    stored(alive, 4, right)
    (other,) = elsewhere([prompt(4)], settings(host) | {"model_id": "another"})
    assert other["cached"] == 0
    assert other["tokens"] == right[4]["tokens"]


def pages_of(engine, seed):
    """The bytes of the first page of each block of a prompt, as they lie in vLLM's cache now."""
    engine.ask(prompt(seed))
    layer = next(iter(engine.worker.pages[0].tensors))
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    pages = []
    name = engine.add(prompt(seed))
    engine.front.step()
    request = next(iter(engine.scheduler.requests.values()))
    for block_hash in request.block_hashes[: ALL // BLOCK]:
        held = engine.pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(block_hash, 0))
        pages.append(layer[held.block_id].contiguous().numpy().tobytes())
    engine.front.abort_request([name])
    engine.finish()
    return pages


def test_a_damaged_block_is_computed(alive, right, elsewhere, host):
    stored(alive, 5, right)
    pages = pages_of(alive, 5)
    assert host.damage(pages[2]) >= 1, "the block lies in the host's memory"
    alive.forget()
    before = alive.counts()
    (hit,) = alive.ask(prompt(5))
    hit.same_as(right[5])
    after = alive.counts()
    assert after["load_failed_requests"] - before.get("load_failed_requests", 0) == 1
    assert after["load_failed_blocks"] - before.get("load_failed_blocks", 0) >= 1


def test_without_verifying_a_damaged_block_changes_the_output(alive, right, elsewhere, host):
    """The negative control: if nothing looked, this damage would be seen. Otherwise the test above proves nothing."""
    stored(alive, 6, right)
    for page in pages_of(alive, 6)[:3]:
        assert host.damage(page) >= 1
    (wrong,) = elsewhere([prompt(6)], settings(host) | {"verify": False})
    assert wrong["cached"] == ALL
    assert wrong["logprobs"] != right[6]["logprobs"]


def test_a_damaged_first_block_does_not_loop(alive, right, host):
    """With nothing left of the hit, vLLM asks again; the same answer would fail for ever."""
    stored(alive, 7, right)
    assert host.damage(pages_of(alive, 7)[0]) >= 1
    alive.forget()
    (hit,) = alive.ask(prompt(7))
    assert hit.cached == 0 or hit.cached == ALL
    hit.same_as(right[7])


def test_host_killed_before_a_match(alive, right, host):
    stored(alive, 8, right)
    host.kill()
    (answer,) = alive.ask(prompt(8))
    assert answer.cached == 0
    answer.same_as(right[8])
    alive.forget()
    host.start()
    reach(alive)
    (cold,) = alive.ask(prompt(8))
    assert cold.cached == 0, "another host has nothing"
    alive.forget()
    (hit,) = alive.ask(prompt(8))
    assert hit.cached == ALL, "and is used again"
    hit.same_as(right[8])


@pytest.fixture
def between(monkeypatch):
    """Does something once between a match and the load or save that follows it."""

    def when(half, method, action):
        original = getattr(half, method)

        def once(*arguments):
            result = original(*arguments)
            if not fired:
                fired.append(True)
                action()
            return result

        fired = []
        monkeypatch.setattr(half, method, once)
        return fired

    return when


def test_host_killed_during_a_load(alive, right, host, between):
    stored(alive, 9, right)
    before = alive.counts().get("load_failed_requests", 0)
    paused = between(alive.half, "_hold_at_host", host.pause)
    killed = between(alive.worker, "start_loads", lambda: paused and host.kill())
    alive.add(prompt(9))
    (answer,) = alive.finish()
    assert paused and killed
    answer.same_as(right[9])
    assert alive.counts()["load_failed_requests"] - before == 1


def test_host_that_hangs_during_a_load(alive, right, host, between):
    stored(alive, 10, right)
    before = alive.counts().get("load_failed_requests", 0)
    between(alive.half, "_hold_at_host", host.pause)
    alive.add(prompt(10))
    (answer,) = alive.finish()
    answer.same_as(right[10])
    assert alive.counts()["load_failed_requests"] - before == 1
    host.kill()


def test_host_killed_during_a_save(alive, right, host, between):
    before = alive.counts().get("save_failed_blocks", 0)
    between(alive.half, "_refer", host.pause)
    killed = between(alive.worker, "start_saves", host.kill)
    (answer,) = alive.ask(prompt(11))
    assert killed
    answer.same_as(right[11])
    assert alive.counts()["save_failed_blocks"] > before
    alive.forget()


def furthest(some, others):
    """The largest difference of a log-probability that both name."""
    pairs = zip(some, others, strict=True)
    return max(abs(one[token] - other[token]) for one, other in pairs for token in one.keys() & other.keys())


def test_preemption(alive, right_growing):
    """Four requests that grow beyond 24 blocks: some are preempted while their blocks are saved, and then loaded."""
    before = alive.counts()
    for _ in range(2):
        for answer, one in zip(alive.ask(*GROWING, tokens=120), right_growing, strict=True):
            assert answer.tokens == one["tokens"]
            # Kernels round otherwise in a batch of another shape, and preemption changes the shapes.
            assert furthest(answer.logprobs, one["logprobs"]) < 1e-3
        alive.forget()
    after = alive.counts()
    asked = after["match_queries"] - before.get("match_queries", 0)
    assert after.get("match_remembered", 0) > before.get("match_remembered", 0), f"{asked} questions for 8 requests"
    assert after.get("load_failed_requests", 0) == before.get("load_failed_requests", 0)


def test_abort_during_a_load(alive, right, host, between):
    stored(alive, 12, right)
    between(alive.half, "_hold_at_host", host.pause)
    name = alive.add(prompt(12))
    alive.front.step()
    assert alive.worker._loading, "the load is under way"
    alive.front.abort_request([name])
    host.resume()
    assert alive.finish() == []
    (hit,) = alive.ask(prompt(12))
    hit.same_as(right[12])


def test_a_reset_of_the_connector_forgets_the_host(alive, right):
    stored(alive, 13, right)
    assert alive.llm.reset_prefix_cache(reset_connector=True)
    (cold,) = alive.ask(prompt(13))
    assert cold.cached == 0, "blocks of before the reset are not found"
    cold.same_as(right[13])
    alive.forget()
    (hit,) = alive.ask(prompt(13))
    assert hit.cached == ALL, "those of after it are"
    hit.same_as(right[13])
    assert len(alive.worker._plans) == 1, "the plans of before the reset are gone"


def test_metrics(alive):
    """What was counted reaches vLLM's own metrics."""
    names = {metric.name for metric in alive.llm.get_metrics()}
    assert {"vllm:kvasir_hit_tokens", "vllm:kvasir_load_bytes", "vllm:kvasir_save_blocks"} <= names
