"""Time to the first token and throughput of vLLM on this machine's CPU, with Kvasir and without.

    KVASIR_BIN=... python clients/python/benches/vllm_cpu.py [--rounds 7] [--small]

Two engines run in processes of their own, one with the connector and one without, and take turns, so that a machine whose
speed drifts is as fast for one as for the other. A round asks for a prompt that nobody has seen (cold), empties vLLM's own
cache and asks again (hit); the tokens must be equal. Then both compute a batch of prompts without any hit.

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

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests/vllm"))


def child(job: dict) -> None:
    """An engine that obeys lines of standard input and answers each with a line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import engine
    from vllm import LLM

    llm = LLM(
        **engine.options(
            job["model"],
            job["extra"],
            job["blocks"],
            max_model_len=job["tokens"] + 64,
            max_num_batched_tokens=max(2048, job["tokens"]),
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(json.loads(given.child))
        return
    import host as hosts
    import tiny

    layers, width, heads, length = (2, 128, 2, 256) if given.small else (8, 512, 8, 2048)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = pathlib.Path(folder)
        model = tiny.write(path / "model", layers=layers, width=width, heads=heads)
        host = hosts.Host(path, pool="2GiB").start()
        job = {"model": model, "tokens": length, "blocks": 6 * length // 32}
        extra = {"host": host.address, "model_id": "bench"}
        try:
            engines = {"with": Child({**job, "extra": extra}), "without": Child({**job, "extra": None})}
            print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {layers} layers of {width}")
            first_token(engines, given.rounds, length)
            throughput(engines, given.rounds, length // 4)
            for one in engines.values():
                one.end()
        finally:
            host.kill()


def first_token(engines: dict, rounds: int, length: int) -> None:
    times: dict[str, list[float]] = {"without": [], "cold": [], "hit": []}
    for seed in range(rounds):
        plain, right, _, _ = engines["without"].ask([seed], length, 1, forget=True)
        cold, first, none, _ = engines["with"].ask([seed], length, 1, forget=True)
        hit, again, cached, _ = engines["with"].ask([seed], length, 1, forget=True)
        assert first == again == right, "a hit must not change the tokens"
        assert none == 0 and cached >= length - 32, (none, cached)
        for name, seconds in (("without", plain), ("cold", cold), ("hit", hit)):
            times[name].append(seconds)
    for name, seconds in times.items():
        print(f"time to first token, {length} tokens, {name}: {quartiles(seconds)} s")
    ratios = [cold / hit for cold, hit in zip(times["cold"], times["hit"], strict=True)]
    print(f"cold / hit: {quartiles(ratios)}")


def throughput(engines: dict, rounds: int, length: int) -> None:
    wall, work = [], []
    for turn in range(rounds):
        seeds = [100 + 8 * turn + at for at in range(8)]
        names = list(engines) if turn % 2 else list(engines)[::-1]
        seconds, tokens, spent = {}, {}, {}
        for name in names:
            seconds[name], tokens[name], cached, spent[name] = engines[name].ask(seeds, length, 16, forget=True)
            assert cached == 0
        assert tokens["with"] == tokens["without"]
        wall.append(seconds["without"] / seconds["with"])
        work.append(spent["without"] / spent["with"])
    print(f"throughput with / without, no hits, 8 prompts of {length} and 16 tokens each: {quartiles(wall)}")
    print(f"the same, by processor time of the engine: {quartiles(work)}")


if __name__ == "__main__":
    main()
