"""Prompts from one engine to another, between two real hosts."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
from cluster import meet, metric, pair, until
from daemon import Host
from engine import LAYERS, RUN, Done, Memory, hash_of, hashes, numbers, wait

from kvasir._core import Core

BLOCKS = 8
SIZE = LAYERS * RUN
LONG = 120_000


class Engine:
    """A core next to a host, and its memory."""

    def __init__(self, host: Host, **options: int) -> None:
        self.core = Core(host.unix, **{"match_ms": 5000, "save_ms": 20_000, **options})  # type: ignore[arg-type]
        self.memory = Memory(BLOCKS)
        self.plan = self.memory.plan(self.core)

    def send(self, job: int, transfer: bytes, part: int, names: list[int]) -> None:
        """The block called ``n`` lies in block ``n``."""
        for n in names:
            self.memory.fill(n, n)
        self.core.hand_over(job, self.plan, "host-1", transfer, part, hashes(names), 32, numbers(names), LAYERS)

    def layers(self, job: int, *layers: int) -> None:
        for layer in layers:
            assert self.core.layer_ready(job, layer)

    def receive(self, job: int, transfer: bytes, names: list[int], first: int = 0, ms: int = LONG) -> None:
        """Block ``n`` belongs into the one that is as far from the end."""
        blocks = numbers(BLOCKS - 1 - n for n in names[first:])
        self.core.arrive(job, self.plan, transfer, hashes(names), 32, first, blocks, LAYERS, ms)

    def has(self, n: int) -> bool:
        return self.memory.has(BLOCKS - 1 - n, n)

    def has_layer(self, n: int, layer: int) -> bool:
        at = self.memory.at(BLOCKS - 1 - n, layer)
        return any(self.memory.bytes[at])


@pytest.fixture
def hosts(tmp_path: pathlib.Path, start_host: Callable[..., Host]) -> list[Host]:
    return pair(tmp_path, start_host)


@pytest.fixture
def engines(hosts: list[Host]) -> Iterator[list[Engine]]:
    both = [Engine(host) for host in hosts]
    yield both
    for engine in both:
        engine.core.close()


def good(done: Done, job: int, blocks: int) -> None:
    assert done == (job, True, b"\1" * blocks, blocks * SIZE, None)


def failed(done: Done, job: int, text: str = "") -> None:
    assert (done[0], done[1], set(done[2]), done[3]) == (job, False, {0}, 0) and text in (done[4] or ""), done


def ended(engines: list[Engine]) -> bool:
    """Fails if a job has ended, and says how: what is waited for will not come."""
    early = [done for engine in engines for done in engine.core.drain()]
    assert not early, early
    return False


def no_places(hosts: list[Host]) -> bool:
    return all(metric(host, "kvasir_reservations") == 0 for host in hosts)


@pytest.mark.parametrize("receiver_first", [True, False])
def test_a_prompt_in_two_parts(hosts: list[Host], engines: list[Engine], receiver_first: bool) -> None:
    prefill, decode = engines
    if receiver_first:
        decode.receive(7, b"cmpl-1", [0, 1, 2], first=1)
    for part, names in [(0, [0, 1]), (2, [2])]:
        prefill.send(7, b"cmpl-1", part, names)
        prefill.layers(7, 1, 0, 2)
        good(wait(prefill.core)[0], 7, len(names))
    if not receiver_first:
        decode.receive(7, b"cmpl-1", [0, 1, 2], first=1)
    good(wait(decode.core)[0], 7, 2)
    assert not decode.has(0) and decode.has(1) and decode.has(2)
    assert not prefill.core.layer_ready(7, 0) and not prefill.core.abandon(7)
    until("nothing is left", lambda: all(metric(host, "kvasir_blocks") == 0 for host in hosts))
    assert no_places(hosts)
    sent, came = prefill.core.counters(), decode.core.counters()
    assert (sent["hand_over_jobs"], sent["hand_over_bytes"]) == (2, 3 * SIZE)
    assert (came["arrive_jobs"], came["arrive_blocks"], came["load_jobs"]) == (1, 2, 0)
    prefill.core.unplan(prefill.plan)


def test_two_prompts_at_once_and_a_layer_before_the_next(engines: list[Engine]) -> None:
    prefill, decode = engines
    for job, name in [(1, 0), (2, 3)]:
        transfer = b"cmpl-%d" % job
        decode.receive(job, transfer, [name])
        prefill.send(job, transfer, 0, [name])
    for layer in range(LAYERS):
        for job, name in [(2, 3), (1, 0)]:
            prefill.layers(job, layer)
            until("the layer came", lambda name=name, layer=layer: decode.has_layer(name, layer))  # type: ignore[misc]
    for done, job in zip(wait(prefill.core, 2), [1, 2], strict=True):
        good(done, job, 1)
    for done, job in zip(wait(decode.core, 2), [1, 2], strict=True):
        good(done, job, 1)
    assert decode.has(0) and decode.has(3)


def test_what_is_given_up_is_reported(hosts: list[Host], engines: list[Engine]) -> None:
    prefill, decode = engines
    for job, gives_up in enumerate([prefill, decode]):
        transfer = b"cmpl-%d" % job
        prefill.send(job, transfer, 0, [job])
        decode.receive(job, transfer, [job])
        prefill.layers(job, 0)
        until("the layer came", lambda job=job: decode.has_layer(job, 0))  # type: ignore[misc]
        assert gives_up.core.abandon(job)
        failed(wait(gives_up.core)[0], job, "given up")
        if gives_up is prefill:
            assert not prefill.core.layer_ready(job, 1)
            failed(wait(decode.core)[0], job, "broke off")
        else:
            prefill.layers(job, 1, 2)
            good(wait(prefill.core)[0], job, 1)
    until("the places are back", lambda: no_places(hosts))


def test_what_does_not_belong_together_is_not_received(engines: list[Engine]) -> None:
    prefill, decode = engines
    prefill.send(1, b"cmpl-1", 0, [0, 1])
    decode.receive(1, b"cmpl-1", [0, 2])
    failed(wait(decode.core)[0], 1, "block 1 of the transfer is another one")
    other = decode.memory.plan(decode.core, bytes(32))
    for job, plan, transfer in [(2, other, b"cmpl-1"), (3, decode.plan, b"cmpl-2")]:
        decode.core.arrive(job, plan, transfer, hashes([0, 1]), 32, 0, numbers([5, 6]), LAYERS, 100)
        failed(wait(decode.core)[0], job, "0 of 2 blocks came in 100 ms")
    prefill.core.abandon(1)
    failed(wait(prefill.core)[0], 1, "given up")


def test_an_engine_that_says_nothing_more(hosts: list[Host]) -> None:
    prefill, decode = Engine(hosts[0], save_ms=300), Engine(hosts[1])
    prefill.send(1, b"cmpl-1", 0, [0])
    decode.receive(1, b"cmpl-1", [0])
    prefill.layers(1, 1)
    failed(wait(prefill.core)[0], 1)
    failed(wait(decode.core)[0], 1)
    prefill.core.close()
    decode.core.close()


@pytest.mark.parametrize("dies", [0, 1])
def test_a_host_that_is_killed_between_two_layers(hosts: list[Host], engines: list[Engine], dies: int) -> None:
    prefill, decode = engines
    prefill.send(1, b"cmpl-1", 0, [0])
    decode.receive(1, b"cmpl-1", [0])
    prefill.layers(1, 0)
    until("the layer came", lambda: decode.has_layer(0, 0))
    hosts[dies].stop()
    for layer in range(1, LAYERS):
        prefill.core.layer_ready(1, layer)
    failed(wait(prefill.core)[0], 1)
    failed(wait(decode.core)[0], 1)
    # The next one goes well when the host is back.
    hosts[dies].start()
    meet(hosts)
    decode.receive(2, b"cmpl-2", [3])
    prefill.send(2, b"cmpl-2", 0, [3])
    prefill.layers(2, *range(LAYERS))
    good(wait(prefill.core)[0], 2, 1)
    good(wait(decode.core)[0], 2, 1)
    assert decode.has(3)


def test_a_prefill_engine_that_is_killed(hosts: list[Host]) -> None:
    script = """
        import sys
        from test_handing import Engine
        class Host:
            unix = sys.argv[1]
        prefill = Engine(Host)
        prefill.send(1, b"cmpl-1", 0, [0])
        prefill.layers(1, 0)
        print("begun", flush=True)
        sys.stdin.read()
    """
    here = pathlib.Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), hosts[0].unix],
        cwd=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    decode = Engine(hosts[1])
    decode.receive(1, b"cmpl-1", [0])
    until("the layer came", lambda: decode.has_layer(0, 0))
    child.send_signal(signal.SIGKILL)
    child.wait()
    failed(wait(decode.core)[0], 1, "broke off")
    decode.core.close()
    until("the places are back", lambda: no_places(hosts))


def test_a_host_that_hangs_costs_a_receiver_its_time_and_no_more(hosts: list[Host]) -> None:
    decode = Engine(hosts[1])
    hosts[1].hang()
    decode.receive(1, b"cmpl-1", [0], ms=200)
    failed(wait(decode.core)[0], 1)
    # One that is under way is hung up on.
    decode.receive(2, b"cmpl-1", [0])
    decode.core.abandon(2)
    decode.core.close()
    failed(decode.core.drain()[0], 2, "given up")
    hosts[1].stop()


def test_closing_in_the_middle_reports_everything(hosts: list[Host], engines: list[Engine]) -> None:
    prefill, decode = engines
    for job in range(4):
        decode.receive(job, b"cmpl-%d" % job, [job])
        prefill.send(job, b"cmpl-%d" % job, 0, [job])
        prefill.layers(job, 0)
    until("layers came", lambda: all(decode.has_layer(n, 0) for n in range(4)) or ended(engines))
    for engine in (decode, prefill):
        engine.core.close()
        done = sorted(engine.core.drain())
        assert len(done) == 4
        for job in range(4):
            failed(done[job], job, "closed")
        assert not engine.core.layer_ready(0, 1) and not engine.core.abandon(0)
        engine.core.unplan(engine.plan)
    until("the places are back", lambda: no_places(hosts))


def test_what_makes_no_sense_is_refused_and_not_reported(hosts: list[Host], engines: list[Engine]) -> None:
    core, plan, one = engines[0].core, engines[0].plan, hash_of(1)
    sends = [
        ("are not as many groups", (plan, "host-1", b"t", 0, one, 32, numbers([0]), 2)),
        ("are not as many groups", (plan, "host-1", b"t", 0, one, 32, numbers([0]), 0)),
        ("not in the plan", (plan, "host-1", b"t", 0, one, 32, numbers([BLOCKS]), LAYERS)),
        ("block numbers", (plan, "host-1", b"t", 0, one, 32, numbers([0, 1]), LAYERS)),
        ("one key at least", (plan, "host-1", b"t", 0, b"", 32, b"", LAYERS)),
        ("1 to 256 bytes", (plan, "host-1", b"", 0, one, 32, numbers([0]), LAYERS)),
        ("1 to 256 bytes", (plan, "host-1", b"t" * 257, 0, one, 32, numbers([0]), LAYERS)),
        ("32 bits", (plan, "host-1", b"t", 2**32 - 1, one, 32, numbers([0]), LAYERS)),
    ]
    for text, given in sends:
        with pytest.raises(ValueError, match=text):
            core.hand_over(1, *given)
    receives = [
        ("are not as many groups", (plan, b"t", one, 32, 0, numbers([0]), LAYERS + 1, LONG)),
        ("block numbers", (plan, b"t", one, 32, 1, numbers([0]), LAYERS, LONG)),
        ("one key at least", (plan, b"t", one, 32, 2, b"", LAYERS, LONG)),
        ("one key at least", (plan, b"t", b"", 32, 0, b"", LAYERS, LONG)),
    ]
    for text, wanted in receives:
        with pytest.raises(ValueError, match=text):
            core.arrive(1, *wanted)
    with pytest.raises(KeyError):
        core.arrive(1, 77, b"t", one, 32, 0, numbers([0]), LAYERS, LONG)
    engines[0].receive(1, b"t", [0])
    with pytest.raises(ValueError, match="not reported yet"):
        engines[0].receive(1, b"t", [0])
    assert core.abandon(1)
    failed(wait(core)[0], 1)
    # A host that was not told of the other, and TCP, are the engine's to hear of by the job.
    core.hand_over(1, plan, "host-7", b"t", 0, one, 32, numbers([0]), LAYERS)
    failed(wait(core)[0], 1, "no peer is called host-7")
    tcp = Core(hosts[0].tcp, token=hosts[0].token())
    memory = Memory(1)
    tcp.hand_over(1, memory.plan(tcp), "host-1", b"t", 0, one, 32, numbers([0]), LAYERS)
    failed(wait(tcp)[0], 1, "Unix socket")
    tcp.close()


def test_a_child_of_a_fork_is_refused(engines: list[Engine]) -> None:
    prefill, _ = engines
    prefill.send(1, b"cmpl-1", 0, [0])
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], object]] = [
            lambda: prefill.core.layer_ready(1, 0),
            lambda: prefill.core.abandon(1),
            lambda: prefill.send(2, b"t", 0, [0]),
            lambda: prefill.receive(2, b"t", [0]),
        ]
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert prefill.core.abandon(1)
    failed(wait(prefill.core)[0], 1)
