"""Time to the first token and throughput of vLLM on this machine's CPU, with Kvasir and without.

    KVASIR_BIN=... python clients/python/benches/vllm_cpu.py [--rounds 7] [--small] [--peer lmcache]

Two engines run in processes of their own, one with the connector and one without, and where asked for a third with a peer's. They
take turns, so that a machine whose speed drifts is as fast for one as for the other. A round asks for a prompt that nobody has
seen (cold), empties vLLM's own cache and asks again (hit); the tokens must be equal. Then all compute a batch of prompts without
any hit.

The bound: a hit moves the prompt's KV once, so it cannot be faster than bytes / memory bandwidth, and computes one token.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests/vllm"))


def child(job: dict) -> None:
    """An engine that obeys lines of standard input and answers each with a line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import engine
    from vllm import LLM

    if job.get("transfer"):
        # LMCache imports numba, one of whose objects answers for every attribute with a function. vLLM 0.32 for CPUs asks all
        # objects for their `__dict__` and would fail on that one.
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}

    llm = LLM(
        **engine.options(
            job["model"],
            job["extra"],
            job["blocks"],
            max_model_len=job["tokens"] + 64,
            max_num_batched_tokens=max(2048, job["tokens"]),
            **({"kv_transfer_config": job["transfer"]} if job.get("transfer") else {}),
            distributed_executor_backend="uni",
        )
    )
    core = llm.llm_engine.engine_core.engine_core

    def settle() -> None:
        while core.scheduler.has_requests():
            core.step()

    def ask(prompts: list[list[int]], tokens: int) -> tuple[float, list, int, float]:
        start, spent = time.perf_counter(), time.process_time()
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], engine.sampling(tokens), use_tqdm=False)
        seconds = time.perf_counter() - start
        settle()
        # All threads of the process, also those that go on saving after the answer.
        spent = time.process_time() - spent
        return seconds, [list(one.outputs[0].token_ids) for one in outputs], outputs[0].num_cached_tokens, spent

    ask([engine.prompt(9_999, 64)], 2)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["forget"]:
            assert llm.reset_prefix_cache()
        prompts = [engine.prompt(seed, order["length"]) for seed in order["seeds"]]
        print(json.dumps(ask(prompts, order["tokens"])), flush=True)


class Child:
    def __init__(self, job: dict) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE, "--child", json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while (line := self.process.stdout.readline().strip()) != "ready":
            assert self.process.poll() is None, "the engine ended"
            print(line, file=sys.stderr)

    def ask(self, seeds: list[int], length: int, tokens: int, *, forget: bool) -> tuple[float, list, int, float]:
        self.process.stdin.write(
            json.dumps({"seeds": seeds, "length": length, "tokens": tokens, "forget": forget}) + "\n"
        )
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("["):
            assert line, "the engine ended"
        return tuple(json.loads(line))

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"median {middle:.4f} (quartiles {low:.4f} to {high:.4f}, n {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a size that only shows that it runs")
    parser.add_argument("--peer", choices=["lmcache"], help="another cache that serves the same engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(json.loads(given.child))
        return
    import host as hosts
    import lmcache_peer
    import tiny

    layers, width, heads, length = (2, 128, 2, 640) if given.small else (8, 512, 8, 2048)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = pathlib.Path(folder)
        model = tiny.write(path / "model", layers=layers, width=width, heads=heads)
        host = hosts.Host(path, pool="2GiB").start()
        peer = lmcache_peer.Server(path) if given.peer else None
        job = {"model": model, "tokens": length, "blocks": 6 * length // 32}
        extra = {"host": host.address, "model_id": "bench"}
        try:
            engines = {"kvasir": Child({**job, "extra": extra}), "without": Child({**job, "extra": None})}
            if peer:
                engines[given.peer] = Child({**job, "extra": None, "transfer": peer.transfer()})
            print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {layers} layers of {width}")
            first_token(engines, given.rounds, length)
            throughput(engines, given.rounds, length // 4)
            for one in engines.values():
                one.end()
        finally:
            host.kill()
            if peer:
                peer.kill()


def first_token(engines: dict, rounds: int, length: int) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    reused = {}
    for seed in range(rounds):
        plain, right, _, _ = engines["without"].ask([seed], length, 1, forget=True)
        times["without"].append(plain)
        for name in engines.keys() - {"without"}:
            cold, first, none, _ = engines[name].ask([seed], length, 1, forget=True)
            hit, again, reused[name], _ = engines[name].ask([seed], length, 1, forget=True)
            assert first == again == right, f"a hit must not change the tokens: {name}"
            assert none == 0 and reused[name] > 0, (name, none, reused[name])
            times[f"{name}, cold"].append(cold)
            times[f"{name}, hit"].append(hit)
            ratios[name].append(cold / hit)
    assert reused["kvasir"] >= length - 32
    for name, seconds in sorted(times.items()):
        print(f"time to first token, {length} tokens, {name}: {quartiles(seconds)} s")
    for name, values in sorted(ratios.items()):
        print(f"cold / hit, {name}, {reused[name]} tokens reused: {quartiles(values)}")


def throughput(engines: dict, rounds: int, length: int) -> None:
    wall, work = defaultdict(list), defaultdict(list)
    for turn in range(rounds):
        seeds = [100 + 8 * turn + at for at in range(8)]
        names = list(engines) if turn % 2 else list(engines)[::-1]
        seconds, tokens, spent = {}, {}, {}
        for name in names:
            seconds[name], tokens[name], cached, spent[name] = engines[name].ask(seeds, length, 16, forget=True)
            assert cached == 0
        for name in engines.keys() - {"without"}:
            assert tokens[name] == tokens["without"], name
            wall[name].append(seconds["without"] / seconds[name])
            work[name].append(spent["without"] / spent[name])
    for name in sorted(wall):
        what = f"throughput {name} / without, no hits, 8 prompts of {length} and 16 tokens each"
        print(f"{what}: {quartiles(wall[name])}")
        print(f"the same, by processor time of the engine: {quartiles(work[name])}")


if __name__ == "__main__":
    main()
