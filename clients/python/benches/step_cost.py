"""What the connector adds to a step of vLLM, in the scheduler and in a worker.

    KVASIR_BIN=... python clients/python/benches/step_cost.py [--rounds 25] [--small]

vLLM's own scheduler with the connector, a real host, and the tests' model in place of a real one (`tests/vllm/rig.py`). A prompt
of 1,024 blocks is computed and saved in one step, vLLM's own cache is emptied, and the prompt is loaded. Pages are small, so that
what is measured is the work for a block that grows with no page: questions, metadata and the giving of jobs. Each round has a
prompt of its own. Times are of one call each, on the wall.
"""

import argparse
import json
import os
import pathlib
import pickle
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests/vllm"))

GOALS_US = {
    "match, all there": 150,
    "match, none there": 150,
    "match, again": 5,
    "metadata, saves": 300,
    "metadata, empty": 10,
    "submit, load": 50,
    "submit, save": 50,
    "drain, empty": 3,
}
"""Of the median, for 1,024 blocks on a quiet machine."""


class Clock:
    """Times of calls, by what they did."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def of(self, name: str, call: Callable, *arguments: object) -> object:
        start = time.perf_counter()
        result = call(*arguments)
        self.times[name].append((time.perf_counter() - start) * 1e6)
        return result

    def around(self, holder: object, method: str, name: Callable[..., str | None]) -> None:
        """From now on times each call of a method; `name` is given its arguments and result, and says what it was."""
        original = getattr(holder, method)

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            result = original(*arguments)
            took = (time.perf_counter() - start) * 1e6
            if what := name(result, *arguments):
                self.times[what].append(took)
            return result

        setattr(holder, method, timed)


def measure(rig, clock: Clock, rounds: int, blocks: int, stop: Callable[[], None]) -> None:
    from engine import prompt
    from rig import BLOCK

    half, worker = rig.half, rig.workers[0].worker

    def metadata(step, *_) -> str | None:
        if step.saves:
            clock.of("metadata, saves, pickled and back", lambda: pickle.loads(pickle.dumps(step)))
        return "metadata, saves" if step.saves else None if step.loads else "metadata, empty"

    clock.around(half, "build", metadata)
    clock.around(worker, "start_loads", lambda _, step: "submit, load" if step.loads else None)
    clock.around(worker, "start_saves", lambda _, step: "submit, save" if step.saves else None)

    def match(name: str, tokens: list[int]) -> None:
        request = rig.add(tokens, 1)
        found, _ = clock.of(f"match, {name}", half.match, request, 0)
        assert found == (blocks * BLOCK if name == "all there" else 0), (name, found)
        clock.of("match, again", half.match, request, 0)

    for seed in range(rounds + 1):
        if seed == 1:
            # The first round makes connections and plans.
            clock.times.clear()
        # The last token is always computed, so one block more than is asked for.
        tokens = prompt(seed, blocks * BLOCK + 1)
        for name in ("none there", "all there"):
            match(name, tokens)
            rig.run()
            rig.forget()
        for _ in range(10):
            assert clock.of("drain, empty", worker.core.drain) == []
    stop()
    for seed in range(rounds):
        request = rig.add(prompt(rounds + 1 + seed, blocks * BLOCK + 1), 1)
        assert clock.of("match, host away", half.match, request, 0) == (0, False)
        rig.abort(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="a size that only shows that it runs")
    given = parser.parse_args()
    rounds, blocks = (4, 16) if given.small else (given.rounds, 1024)

    # First, as it says how much vLLM logs.
    import engine  # noqa: F401
    import host as hosts
    import tiny
    from rig import BLOCK, Rig

    tokens = (blocks + 2) * BLOCK
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = pathlib.Path(folder)
        model = pathlib.Path(tiny.write(path / "model"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
        host = hosts.Host(path, pool="1GiB").start()
        # Long enough that a busy machine is measured instead of given up.
        settings = {"host": host.address, "model_id": "bench", "save_share": 1.0, "match_ms": 1000, "load_ms": 10000}
        size = {"max_model_len": tokens, "max_num_batched_tokens": tokens}
        rig = Rig(str(model), settings, blocks=blocks + 8, **size)
        clock = Clock()
        try:
            print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {blocks} blocks, {rounds} rounds")
            measure(rig, clock, rounds, blocks, host.kill)
            rig.shutdown()
        finally:
            host.kill()
    for name in sorted(clock.times):
        times = clock.times[name]
        low, middle, high = statistics.quantiles(times, n=4)
        goal = f", goal {GOALS_US[name]}" if name in GOALS_US else ""
        print(f"{name}: median {middle:.1f} us (quartiles {low:.1f} to {high:.1f}, n {len(times)}{goal})")


if __name__ == "__main__":
    main()
