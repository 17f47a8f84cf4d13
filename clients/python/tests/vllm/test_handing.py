"""Prompts handed over from one engine to another, each with a host of its own: every entry that arrives is looked at.

The engines are `rig`'s, whose model notices KV that is not the request's own in the step that would read it.
"""

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

import host as hosts
from engine import prompt
from rig import BLOCK, Fault, Rig, WrongKV
from test_contract import NOBODY

from kvasir.vllm import handing
from kvasir.vllm.layers import Layers
from kvasir.vllm.messages import Part, StepMetadata
from kvasir.vllm.settings import Settings
from kvasir.vllm.sources import UNKNOWN
from kvasir.vllm.worker import WorkerHalf

ALL = 192
"""Tokens in whole blocks of a prompt of 200."""
LONG_MS = 120_000
"""A wait that no test comes to the end of."""


@pytest.fixture(scope="module")
def both(folder):
    """The hosts beside the prefill engine and the decode engine."""
    if hosts.binary() is None:
        pytest.skip("no kvasir program; build it, or set KVASIR_BIN")
    (folder / "handing").mkdir()
    pair = hosts.pair(folder / "handing")
    yield pair
    for one in pair:
        one.kill()


@pytest.fixture
def pair(both):
    """Two hosts that know each other, whatever the test before did to them."""
    if dead := [one for one in both if not one.alive]:
        for one in dead:
            one.kill()
            one.start()
        hosts.meet(both)
    return both


class Engine(Rig):
    """A rig that keeps what was counted, and how many tokens it computed."""

    def __init__(self, model, settings, **options) -> None:
        super().__init__(model, settings, **{"layers": 3, "max_num_batched_tokens": 64, **options})
        self.counted: Counter[str] = Counter()
        self.computed = 0
        for half in (self.half, *(worker.worker for worker in self.workers)):
            half.stats = self._kept(half.stats)

    def _kept(self, take):
        def stats():
            taken = take()
            self.counted.update(taken.data if taken else {})
            return taken

        return stats

    def _forward(self, output) -> None:
        self.computed += output.total_num_scheduled_tokens
        super()._forward(output)


@pytest.fixture
def engines(model, pair, request):
    """Makes a prefill engine and a decode engine. They share nothing but what their hosts hand over."""
    made = []

    def make(prefill=None, decode=None, **options):
        common = {"model_id": request.node.name, "save_share": 1.0, "match_ms": 5000, "save_ms": 5000}
        common["hand_over_ms"] = LONG_MS
        for host, own in zip(pair, (prefill, decode), strict=True):
            settings = common | {"host": host.address, "hand_over_to": "decode"} | (own or {})
            made.append(Engine(model, settings, **options))
        return made[-2:]

    yield make
    for one in made:
        one.shutdown()


def asks(transfer="xfer-1"):
    """What proxies for vLLM's Mooncake connector send to both engines at once."""
    common = {"transfer_id": transfer}
    prefill = {"do_remote_decode": True, "do_remote_prefill": False} | common
    address = {"remote_bootstrap_addr": "http://127.0.0.1:1", "remote_engine_id": "prefill"}
    return prefill, {"do_remote_decode": False, "do_remote_prefill": True} | address | common


def run(*rigs):
    """Steps all engines until none has anything left to do."""
    until = time.monotonic() + 100
    while any(rig.scheduler.has_requests() for rig in rigs):
        assert time.monotonic() < until, "not at rest"
        for rig in rigs:
            if rig.scheduler.has_requests():
                rig.step()
    for rig in rigs:
        rig.at_rest()


def together(prefill, decode, tokens, generate=4):
    """Both requests at once, as a proxy sends them. Returns the decode engine's."""
    for_prefill, for_decode = asks()
    first = prefill.add(tokens, 1, for_prefill)
    second = decode.add(tokens, generate, for_decode)
    run(prefill, decode)
    assert first.is_finished() and second.is_finished()
    return second


def until(condition, *rigs):
    """Steps engines until something holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        for rig in rigs:
            if rig.scheduler.has_requests():
                rig.step()


def test_a_prompt_in_parts_is_not_computed_again(engines):
    prefill, decode = engines()
    together(prefill, decode, prompt(1))
    assert prefill.counted["hand_over_blocks"] == decode.counted["arrive_blocks"] == ALL // BLOCK
    assert decode.counted["arrive_tokens"] == ALL
    assert decode.computed == 200 - ALL + 3, "the rest of the prompt, and a step for each further token"
    assert prefill.counted["hand_over_bytes"] > 0 and decode.counted["arrive_bytes"] > 0
    assert not decode.counted["arrive_failed_requests"] and not decode.counted["load_requests"]


@pytest.mark.parametrize("tokens", [BLOCK, 2 * BLOCK, ALL, 5 * BLOCK + 1], ids=str)
def test_prompts_of_any_length(engines, tokens):
    """Of a prompt of whole blocks all are awaited, and the last token is computed again."""
    prefill, decode = engines()
    together(prefill, decode, prompt(1, tokens))
    whole = tokens - tokens % BLOCK
    assert decode.counted["arrive_tokens"] == whole
    assert decode.computed == max(tokens - whole, 1) + 3


def test_a_prompt_shorter_than_a_block_is_computed(engines):
    prefill, decode = engines()
    together(prefill, decode, prompt(1, BLOCK - 1))
    assert not decode.counted["arrive_tokens"] and decode.computed == BLOCK - 1 + 3


def test_ranks_hand_over_their_own_shards(engines):
    prefill, decode = engines(ranks=2)
    together(prefill, decode, prompt(1))
    assert decode.counted["arrive_blocks"] == 2 * ALL // BLOCK
    assert decode.computed == 200 - ALL + 3


def test_what_the_prefill_engine_had_is_handed_over_too(engines):
    prefill, decode = engines()
    prefill.ask(prompt(1)[:100])
    before = prefill.computed
    together(prefill, decode, prompt(1))
    assert prefill.computed - before == 200 - 96
    assert decode.counted["arrive_tokens"] == ALL and decode.computed == 200 - ALL + 3


def test_what_the_decode_engine_has_is_not_copied(engines):
    prefill, decode = engines()
    decode.ask(prompt(1)[:100])
    before = decode.computed
    together(prefill, decode, prompt(1))
    assert decode.counted["arrive_blocks"] == (ALL - 96) // BLOCK
    assert decode.computed - before == 200 - ALL + 3


def test_what_was_there_from_the_start_is_not_awaited_after_a_preemption(engines):
    """All blocks were local; the request grows, loses them to others, and takes the ordinary path then."""
    _, decode = engines(max_num_batched_tokens=512)
    decode.ask(prompt(1))
    others = [decode.add(prompt(seed, 150), 150) for seed in (2, 3, 4)]
    # The last one to come is the first one to be preempted.
    request = decode.add(prompt(1), 60, asks()[1])
    until(lambda: request.is_finished() and all(other.is_finished() for other in others), decode)
    run(decode)
    assert request.num_preemptions and not decode.counted["arrive_requests"]


def test_prefill_first_and_its_answer_to_the_decode_engine(engines):
    """What proxies for vLLM's NIXL connector do."""
    prefill, decode = engines()
    empty = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"])
    first = prefill.ask(prompt(1), 1, {"do_remote_decode": True, "do_remote_prefill": False} | empty)
    answer = prefill.answered[first.request_id]
    assert answer["do_remote_prefill"] and not answer["do_remote_decode"] and answer["remote_engine_id"]
    decode.ask(prompt(1), 4, answer)
    assert decode.counted["arrive_tokens"] == ALL and decode.computed == 200 - ALL + 3


def test_the_request_names_the_host(engines):
    prefill, decode = engines(prefill={"hand_over_to": ""})
    for_prefill, for_decode = asks()
    prefill.add(prompt(1), 1, for_prefill | {"remote_host": "decode"})
    decode.add(prompt(1), 4, for_decode)
    run(prefill, decode)
    assert decode.counted["arrive_blocks"] == ALL // BLOCK


def test_a_layer_is_copied_before_the_next_one_is_computed(engines):
    """In the middle of the step that computes them: the decode engine's memory has what was computed so far."""
    prefill, decode = engines(max_num_batched_tokens=256)
    for_prefill, for_decode = asks()
    request = decode.add(prompt(1), 4, for_decode)
    until(lambda: decode.workers[0].worker._arriving, decode)
    (table,) = decode.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    states = decode._states(prompt(1)[:ALL])
    seen = []

    def there(layer):
        memory = decode.memory[0][layer]
        return all(
            int(memory[table[at // BLOCK], 0, at % BLOCK, 0]) == state ^ (50 * layer) for at, state in enumerate(states)
        )

    def after(layer):
        until(lambda: there(layer))
        assert not any(there(later) for later in range(layer + 1, 3))
        seen.append(layer)

    prefill.after_layer = after
    prefill.add(prompt(1), 1, for_prefill)
    prefill.step()
    assert seen == [0, 1, 2] and request.num_output_tokens == 0, "nothing is used before all of it was compared"
    prefill.after_layer = lambda layer: None
    run(prefill, decode)
    assert decode.computed == 200 - ALL + 3


def test_a_layer_goes_when_it_is_computed_and_not_before(engines, monkeypatch):
    """The negative control: bytes of a layer that is said to be ready too early are those of nobody."""
    prefill, decode = engines()
    worker, original = prefill.workers[0].worker, Layers.begin

    def too_early(self, jobs):
        original(self, jobs)
        if jobs:
            self.finish(worker.core)
            until(lambda: worker._poll.poll(0))

    monkeypatch.setattr(Layers, "begin", too_early)
    with pytest.raises(WrongKV):
        together(prefill, decode, prompt(1))


def test_layers_that_say_nothing_go_at_the_end_of_the_step(engines, monkeypatch):
    prefill, decode = engines()
    monkeypatch.setattr(prefill.workers[0], "save_kv_layer", lambda *_: None)
    together(prefill, decode, prompt(1))
    assert decode.counted["arrive_blocks"] == ALL // BLOCK


def test_a_part_is_not_larger_than_its_limit(engines, monkeypatch):
    """A step that completes more, as of a prompt that was cached, has several parts: none comes after it."""
    monkeypatch.setattr(handing, "PART_BLOCKS_MAX", 4)
    prefill, decode = engines(max_num_batched_tokens=256)
    parts, begin = [], WorkerHalf.start_parts
    monkeypatch.setattr(WorkerHalf, "start_parts", lambda half, step: (parts.extend(step.parts), begin(half, step)))
    together(prefill, decode, prompt(1))
    assert [(part.first, len(part.job.blocks) // 4) for part in parts] == [(0, 4), (4, 2)]
    assert decode.counted["arrive_tokens"] == ALL and decode.computed == 200 - ALL + 3


def test_what_arrives_is_no_hit_of_the_host(engines, monkeypatch):
    """vLLM asks where tokens come from. The host does not have them, and is not asked."""
    prefill, decode = engines()
    said, whole = [], decode.half.hit_sources
    monkeypatch.setattr(decode.half, "hit_sources", lambda *of: said.append(whole(*of)) or said[-1])
    monkeypatch.setattr("kvasir.vllm.scheduler.sources", lambda *_: pytest.fail("the host was asked"))
    together(prefill, decode, prompt(1))
    assert said == [{UNKNOWN: ALL}]


def test_several_requests_at_once(engines):
    prefill, decode = engines(blocks=64)
    for at in range(5):
        for_prefill, for_decode = asks(f"xfer-{at}")
        prefill.add(prompt(at, 60 + 40 * at), 1, for_prefill)
        decode.add(prompt(at, 60 + 40 * at), 4, for_decode)
    run(prefill, decode)
    assert decode.counted["arrive_requests"] == 5 and not decode.counted["arrive_failed_requests"]


def test_the_decode_engine_keeps_what_arrived(engines):
    """It saves the prompt as if it had computed it, so that the next turn of a conversation finds it at its own host."""
    prefill, decode = engines()
    together(prefill, decode, prompt(1))
    decode.forget()
    before = decode.computed
    decode.ask(prompt(1))
    assert decode.counted["hit_tokens"] == ALL and decode.computed - before == 200 - ALL + 3


# What falls back to computing


def computed_alone(decode, tokens=200, generate=4):
    """Nothing arrived, and the decode engine computed all of it."""
    assert decode.counted["arrive_failed_requests"] == decode.counted["arrive_requests"] == 1
    assert decode.computed == tokens + generate - 1


def test_nobody_comes(engines):
    _, decode = engines(decode={"hand_over_ms": 300})
    decode.ask(prompt(1), 4, asks()[1])
    computed_alone(decode)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"hand_over_to": "nobody"}, {}),
        ({"host": "unix:/nonexistent/kvasir.sock"}, {}),
        ({}, {"host": "unix:/nonexistent/kvasir.sock"}),
        ({"weights_version": "2"}, {}),
        ({"host": "tcp://127.0.0.1:1"}, {}),
        ({"hand_over_to": ""}, {}),
    ],
    ids=["unknown peer", "no prefill host", "no decode host", "other weights", "tcp", "no name"],
)
def test_a_hand_over_that_cannot_be(engines, prefill, decode):
    prefill, decode = engines(prefill=prefill, decode={"hand_over_ms": 500} | decode)
    together(prefill, decode, prompt(1))
    computed_alone(decode)


def test_other_tokens_are_refused(engines):
    """The same transfer, another prompt: a proxy that mixed up its requests."""
    prefill, decode = engines(decode={"hand_over_ms": 1000})
    for_prefill, for_decode = asks()
    prefill.add(prompt(1), 1, for_prefill)
    decode.add(prompt(2), 4, for_decode)
    run(prefill, decode)
    computed_alone(decode)


def test_the_prefill_request_is_aborted(engines):
    prefill, decode = engines(decode={"hand_over_ms": 1500})
    for_prefill, for_decode = asks()
    first = prefill.add(prompt(1), 1, for_prefill)
    decode.add(prompt(1), 4, for_decode)
    prefill.step()
    prefill.abort(first)
    run(prefill, decode)
    assert prefill.counted["hand_over_blocks"] + prefill.counted["hand_over_failed_blocks"] == 64 // BLOCK
    computed_alone(decode)


def test_the_decode_request_is_aborted(engines):
    """Its wait is given up at once, as it holds blocks. The prefill engine ends as ever."""
    prefill, decode = engines(decode={"hand_over_ms": 10 * LONG_MS})
    for_prefill, for_decode = asks()
    second = decode.add(prompt(1), 4, for_decode)
    until(lambda: decode.workers[0].worker._arriving, decode)
    decode.abort(second)
    run(decode)
    prefill.ask(prompt(1), 1, for_prefill)
    decode.ask(prompt(1))
    assert decode.computed == 200 + 3


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_host_dies_in_the_middle_of_a_step(engines, pair, which, layer):
    prefill, decode = engines(decode={"hand_over_ms": 3000})
    for_prefill, for_decode = asks()
    decode.add(prompt(1), 4, for_decode)
    until(lambda: decode.workers[0].worker._arriving, decode)
    host = pair[which == "decode"]
    prefill.after_layer = lambda at: at == layer and host.kill()
    prefill.add(prompt(1), 1, for_prefill)
    run(prefill, decode)
    computed_alone(decode)


def test_the_prefill_host_hangs(engines, pair):
    """Its engine gives the hand-over up after `save_ms`, and has its blocks again; the other one computes."""
    prefill, decode = engines(decode={"hand_over_ms": 1000}, prefill={"save_ms": 1000})
    prefill.after_layer = lambda at: at == 1 and pair[0].pause()
    for_prefill, for_decode = asks()
    decode.add(prompt(1), 4, for_decode)
    prefill.add(prompt(1), 1, for_prefill)
    try:
        run(prefill, decode)
    finally:
        pair[0].kill()
    computed_alone(decode)


def test_a_failed_part_ends_the_others(engines, pair):
    """What follows is of no use: it is not begun, and the proxy is told nothing."""
    prefill, decode = engines(decode={"hand_over_ms": 1000})
    pair[0].kill()
    request = prefill.add(prompt(1, 400), 1, asks()[0])
    until(lambda: prefill.counted["hand_over_failed_blocks"], prefill)
    begun = prefill.half.handing._handed[request.request_id].done if not request.is_finished() else 0
    run(prefill, decode)
    assert begun < 400 // BLOCK and prefill.answered[request.request_id] is None


@pytest.mark.parametrize("layer", [0, 1])
def test_nothing_of_a_step_that_fails_is_handed_over(engines, monkeypatch, layer):
    """vLLM finishes the step of a forward pass that has raised: the layers after that are not final."""

    def fail(at):
        if at == layer:
            raise Fault

    prefill, decode = engines(decode={"hand_over_ms": 3000}, max_num_batched_tokens=256)
    prefill.after_layer = fail
    for_prefill, for_decode = asks()
    prefill.add(prompt(1), 1, for_prefill)
    decode.add(prompt(1), 4, for_decode)
    run(prefill, decode)
    computed_alone(decode)
    assert prefill.counted["hand_over_failed_blocks"] == prefill.counted["save_failed_blocks"] == ALL // BLOCK
    assert not prefill.counted["hand_over_blocks"] and not prefill.counted["save_blocks"]


def test_a_worker_without_layers_reports_its_parts(engines):
    prefill, _ = engines()
    worker, half = prefill.workers[0].worker, prefill.half
    worker.layers = None
    job = half._numbered("r", 0, [bytes(32)] * 2, [1, 2])
    step = StepMetadata(parts=[Part(job, "decode", b"x", 0)])
    worker.start_parts(step)
    worker.results(step)
    report = worker.report()
    assert report.saved == {job.number: 1} and report.broken == {job.number} and not worker._running


def test_a_host_that_failed_is_left_alone_for_a_while(engines, monkeypatch, caplog_vllm):
    """Else each decode request would wait for what never comes. Meanwhile the proxy is told at once, and other hosts are used."""
    clock = [1000.0]
    prefill, _ = engines(max_num_batched_tokens=256)
    monkeypatch.setattr(handing, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def answer(seed, peer):
        request = prefill.ask(prompt(seed), 1, asks(f"xfer-{seed}")[0] | {"remote_host": peer})
        return prefill.answered[request.request_id]

    assert answer(1, "nobody")["transfer_id"] == "xfer-1", "its only part fails after it has ended"
    assert answer(2, "nobody") is None and answer(3, "nobody") is None
    assert prefill.counted["hand_over_refused_requests"] == 2
    assert sum("the same host failed" in line for line in caplog_vllm) == 1
    assert answer(4, "decode") is not None
    clock[0] += handing.PAUSE_SECONDS
    assert answer(5, "nobody") is not None and len(prefill.half.handing._paused) == 1


def test_a_short_prompt_is_no_failure(engines):
    """Nobody waits for it, so that a proxy need not ask again."""
    prefill, _ = engines()
    request = prefill.ask(prompt(1, BLOCK - 1), 1, asks()[0])
    assert prefill.answered[request.request_id] == {"do_remote_prefill": False, "do_remote_decode": False}


def test_what_does_not_arrive_is_loaded_from_the_host(engines):
    """A hand-over that failed says nothing about blocks that the host has."""
    _, decode = engines(decode={"hand_over_ms": 300})
    decode.ask(prompt(1))
    decode.forget()
    before = decode.computed
    decode.ask(prompt(1), 4, asks()[1])
    assert decode.counted["arrive_failed_requests"] == decode.counted["arrive_requests"] == 1
    assert decode.counted["hit_tokens"] == ALL and decode.computed - before == 200 - ALL + 3


def test_what_neither_arrives_nor_can_be_loaded_is_computed(engines, monkeypatch):
    """Each is tried once."""
    _, decode = engines(decode={"hand_over_ms": 300})
    decode.ask(prompt(1))
    decode.forget()
    before = decode.computed
    copy = decode.workers[0].worker._copy
    monkeypatch.setattr(
        decode.workers[0].worker,
        "_copy",
        lambda kind, job: (lambda plan: 1 // 0) if kind == "load" else copy(kind, job),
    )
    decode.ask(prompt(1), 4, asks()[1])
    assert decode.counted["arrive_failed_requests"] == decode.counted["load_failed_requests"] == 1
    assert decode.computed - before == 200 + 3


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_reset_in_the_middle(engines, which):
    """Other weights from now on: nothing of before is used, and no further hand-over is tried by that engine."""
    prefill, decode = engines(prefill={}, decode={"hand_over_ms": 1500 if which == "prefill" else 10 * LONG_MS})
    for_prefill, for_decode = asks()
    prefill.add(prompt(1), 1, for_prefill)
    decode.add(prompt(1), 4, for_decode)
    decode.step()
    prefill.step()
    one = prefill if which == "prefill" else decode
    one.connector.reset_cache()
    run(prefill, decode)
    computed_alone(decode)
    refused = one.counted["hand_over_refused_requests"]
    one.forget()
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.ask(prompt(2), 1, asks("xfer-2")[which == "decode"])
    assert one.counted["hand_over_refused_requests"] == refused + 1


def test_samples_of_one_prompt_await_it_once(engines):
    """`n` samples are requests of one transfer: one of them has it."""
    prefill, decode = engines(blocks=48)
    for_prefill, for_decode = asks()
    prefill.add(prompt(1), 1, for_prefill)
    for _ in range(3):
        decode.add(prompt(1), 4, for_decode)
    run(prefill, decode)
    assert decode.counted["arrive_requests"] == 1 and not decode.counted["arrive_failed_requests"]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"window": 64, "blocks": 48}, {}),
        ({"ranks": 2, "replicas": 2}, {}),
        ({}, {"transfer_id": None}),
        ({}, {"transfer_id": 7}),
        ({}, {"transfer_id": "x" * 257}),
    ],
    ids=["groups", "same heads", "no transfer", "a number", "too long"],
)
def test_what_is_not_handed_over_is_computed_and_said_once(engines, options, params, caplog_vllm):
    _, decode = engines(**options)
    for _ in range(2):
        decode.ask(prompt(1), 4, asks()[1] | params)
        decode.forget()
    assert decode.counted["hand_over_refused_requests"] == 2 and not decode.counted["arrive_requests"]
    assert sum("a prompt is not awaited" in line for line in caplog_vllm) == 1


@pytest.fixture
def caplog_vllm(monkeypatch):
    """Warnings of the connector's scheduler half."""
    from kvasir.vllm import handing

    lines = []
    monkeypatch.setattr(handing.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_who_lost_its_blocks_lets_those_behind_it_go_first(engines):
    """Prompts that never arrive. The first could be loaded then, for which the others hold too many blocks."""
    _, decode = engines(decode={"hand_over_ms": 300}, blocks=24)
    decode.ask(prompt(0), 1)
    decode.forget()
    waiting = [decode.add(prompt(at), 4, asks(f"xfer-{at}")[1]) for at in range(3)]
    run(decode)
    assert all(request.is_finished() for request in waiting)


def test_what_needs_more_than_half_of_the_blocks_does_not_wait_for_itself(engines):
    """A prompt that never arrives, and that the host has. vLLM keeps its blocks reserved, so its load is never let in."""
    _, decode = engines(decode={"hand_over_ms": 300}, blocks=24)
    long = prompt(0, 450)
    decode.ask(long, 1)
    decode.forget()
    one = decode.add(long, 4, asks("xfer-0")[1])
    run(decode)
    assert one.is_finished()


def test_hand_overs_hold_half_of_the_blocks_at_most(engines, pair):
    """A peer that takes nothing does not take the engine's memory: further prompts are not handed over."""
    # In few steps, before its host takes the peer for dead, which ends what is under way.
    prefill, _ = engines(blocks=48, max_num_batched_tokens=2048, prefill={"save_ms": 60_000})
    pair[1].pause()
    try:
        requests = [prefill.add(prompt(at), 1, asks(f"xfer-{at}")[0]) for at in range(6)]
        until(lambda: all(request.is_finished() for request in requests), prefill)
        assert prefill.half.handing.held == 5 * ALL // BLOCK, "blocks that are being handed over outlive their requests"
    finally:
        pair[1].resume()
    run(prefill)
    assert prefill.counted["hand_over_refused_requests"] == 1
    assert prefill.computed == 6 * 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hand_over_to": 1}, "hand_over_to"),
        ({"hand_over_ms": -1}, "hand_over_ms"),
        ({"hand_over_ms": 0}, "at least 1"),
    ],
)
def test_settings(change, says):
    with pytest.raises(ValueError, match=says):
        Settings.parse(NOBODY | change)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_order_of_events(engines, pair, seed, ranks):
    """Hand-overs, aborts, preemptions, resets, and hosts that hang and die, in an order drawn at random."""
    chance = random.Random(seed)
    short = {"match_ms": 50, "load_ms": 300, "save_ms": 500, "hand_over_ms": 400}
    both = engines(prefill=short, decode=short, ranks=ranks, blocks=24, max_num_batched_tokens=128)
    running = []
    for turn in range(50):
        match chance.randrange(9):
            case 0 | 1 | 2 | 3 | 4:
                tokens = prompt(chance.randrange(4), chance.choice([40, 96, 150, 230, 300]))
                for rig, generate, params in zip(both, (1, chance.choice([1, 5, 40])), asks(f"x{turn}"), strict=True):
                    if chance.random() < 0.9:
                        running.append((rig, rig.add(tokens, generate, params)))
            case 5 if running:
                rig, one = running.pop(chance.randrange(len(running)))
                if not one.is_finished():
                    rig.abort(one)
            case 6:
                chance.choice(both).scheduler.reset_prefix_cache()
            case 7 if chance.random() < 0.4:
                chance.choice(pair).pause()
            case 8:
                for host in pair:
                    host.resume()
                if chance.random() < 0.2:
                    host = chance.choice(pair)
                    host.kill()
                    host.start()
        for _ in range(chance.randrange(1, 8)):
            for rig in both:
                if rig.scheduler.has_requests():
                    rig.step()
    for host in pair:
        host.resume()
    run(*both)
    assert both[1].reads > 1000
