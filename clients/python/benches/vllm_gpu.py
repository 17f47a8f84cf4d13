"""vLLM on one GPU, with Kvasir and without: equal output, time to the first token, throughput, a host that dies.

    KVASIR_BIN=... python clients/python/benches/vllm_gpu.py [--cases ref,kill] [--rounds 5] [--lengths 2048,8192] [--out FOLDER]

Needs vLLM 0.32 and the package `kvasir`, about 40 GB of a GPU and 32 GiB of memory, no network and no weights: models are made
from seeds. Takes about five minutes on an H100, and never longer than a minute more than `--seconds`.

Every engine is a process of its own, which obeys lines at its standard input. Each case prints one line of JSON as soon as it has
ended; one that fails does not stop the others. A table comes last. Timed engines take turns, so that a machine whose speed drifts
is as fast for one as for the other.

The bound: a hit moves the prompt's KV once, so it takes no less than bytes / link rate, and computes one token. The timed model
has 64 KiB of KV a token: 1 GiB for 16,384 tokens, 17 ms over PCIe 5.0 x16 (63 GB/s). Compare `load_gb_per_s` with that rate.
"""

import argparse
import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

HERE = pathlib.Path(__file__).resolve()
ROOT = next(one for one in HERE.parents if (one / "clients/python").is_dir())
sys.path.insert(0, str(ROOT / "clients/python/tests/vllm"))
START = time.monotonic()
CASES = ["ref", "connector", "second", "kill", "tier", "ttft", "throughput"]
HEAD = 128
SHAPE = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
]
SIZES = {"tiny": (4, 512, 4, 2, 1024, 1024), "big": (16, 2048, 16, 8, 8192, 32000)}
PATIENCE = {"match_ms": 2000, "load_ms": 20000, "save_ms": 60000}
# FlashInfer's sampler would be compiled at its first use. Several engines start at the same time.
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


class Failed(Exception):
    """A case cannot go on, and the message says all that there is to know."""


# ------------------------------------------------------------------------------------------------------------- the engine


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens of a prompt that shares no block with one of another seed."""
    state, out = seed * 2654435761 % 2**32 or 1, []
    for _ in range(tokens):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(3 + (state >> 8) % 1000)
    return out


def useful_weights(width: int) -> None:
    """Weights of a useful size, the same in every process: vLLM's dummy ones are so small that wrong KV is not seen."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @torch.no_grad()
    def load(loader, model, config) -> None:
        for at, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(device=parameter.device).manual_seed(1000 + at)
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
            parameter.copy_(drawn * (0.25 * (128 / width) ** 0.5))

    DummyModelLoader.load_weights = load


def around(holder, method: str, before: Callable = lambda *_: None, after: Callable = lambda _: None) -> None:
    """From now on `before` is given the arguments of each call of a method, and `after` its result."""
    original = getattr(holder, method)

    def call(*arguments):
        before(*arguments)
        result = original(*arguments)
        after(result)
        return result

    setattr(holder, method, call)


class Watch:
    """What the connector or the tier did, by its own methods."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.jobs: list[tuple[str, int, float]] = []
        """Loads and saves that ended: which it was, bytes, seconds until the worker heard of the end."""
        self.begun: dict[int, float] = {}
        self.fired: list[str] = []

    def tier(self) -> None:
        from kvasir.vllm.tier import KvasirTier

        for name in ("tier_submit_store", "tier_submit_load"):

            def count(_, job, name=name) -> None:
                self.counted.update({f"{name}_jobs": 1, f"{name}_chunks": len(job.keys)})

            around(KvasirTier, name.removeprefix("tier_"), before=count)

    def connector(self, core) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.half, self.worker = core.scheduler.connector.scheduler, get_kv_transfer_group().worker
        for half in (self.half, self.worker):
            around(half, "stats", after=lambda taken: self.counted.update(taken.data if taken else {}))
        around(self.worker, "_start", before=lambda job, *_: self.begun.update({job.number: time.perf_counter()}))
        for method in ("_loaded", "_saved"):

            def ended(running, ok, here, copied, *_, kind={"_loaded": "load", "_saved": "save"}[method]) -> None:
                since = self.begun.pop(running.job.number, None)
                if since is not None and copied:
                    self.jobs.append((kind, copied, time.perf_counter() - since))

            around(self.worker, method, before=ended)

    def kill_between(self, pid: int) -> None:
        """The host stands still once a load is promised, and is killed when the worker has begun it."""

        def fire(method: str, sent: signal.Signals) -> None:
            if method not in self.fired:
                self.fired.append(method)
                if "_hold_at_host" in self.fired:
                    os.kill(pid, sent)

        around(self.half, "_hold_at_host", after=lambda _: fire("_hold_at_host", signal.SIGSTOP))
        around(self.worker, "start_loads", after=lambda _: fire("start_loads", signal.SIGKILL))


def child(job: dict, reply: Callable[[dict], None]) -> None:
    """An engine that obeys lines of standard input and answers each with a line."""
    began, watch = time.monotonic(), Watch()
    import engine  # first, as it says that vLLM is to be offline and in this process
    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    if job["kind"] == "tier":
        watch.tier()
    useful_weights(job["width"])
    llm = LLM(**engine.options(job["model"], job["extra"], **job["more"]))
    client = llm.llm_engine.engine_core
    core = client.engine_core
    if job["kind"] == "connector":
        watch.connector(core)

    def step_until(done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 60
        while not done():
            client.get_output()
            assert time.monotonic() < until, what

    def idle() -> bool:
        return not (core.scheduler.has_requests() or getattr(core, "batch_queue", None))

    def ask(prompts: list[list[int]], tokens: int = 1, logprobs: int | None = None) -> dict:
        how = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs)
        start, spent = time.perf_counter(), time.process_time()
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], how, use_tqdm=False)
        seconds = time.perf_counter() - start
        step_until(idle, "requests are held for ever")
        # All threads of the process, also those that go on saving after the answer.
        spent, answers = time.process_time() - spent, []
        for one in outputs:
            steps = [{token: entry.logprob for token, entry in step.items()} for step in one.outputs[0].logprobs or []]
            generated = list(one.outputs[0].token_ids)
            answers.append({"tokens": generated, "cached": one.num_cached_tokens, "logprobs": steps})
        return {"seconds": seconds, "cpu": spent, "answers": answers}

    about = {"ready": round(time.monotonic() - began, 1), "device": torch.cuda.get_device_name(), "vllm": __version__}
    runner, config = core.model_executor.driver_worker.worker.model_runner, llm.llm_engine.vllm_config
    about |= {"blocks": core.scheduler.kv_cache_config.num_blocks, "runner": type(runner).__module__}
    about["async"] = bool(config.scheduler_config.async_scheduling)
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    about["backend"] = next(iter(layers.values())).get_attn_backend().get_name()
    reply(about)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict = {}
            if order.pop("forget", False):
                step_until(llm.reset_prefix_cache, "the cache is never empty")
            if "kill" in order:
                watch.kill_between(order["kill"])
            if "prompts" in order:
                # A prompt is parts, each a seed and a count of tokens.
                made = [[token for part in one for token in prompt(*part)] for one in order.pop("prompts")]
                answer = ask(made, **order)
            if order.get("stats"):
                answer = {"stats": dict(watch.counted), "jobs": watch.jobs[:]}
                watch.jobs.clear()
            reply(answer | {"fired": watch.fired})
        except Exception:
            reply({"error": traceback.format_exc()[-3900:]})
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------- the parent


class Engine:
    """An engine in a process of its own, which begins to start at once."""

    def __init__(self, name: str, log: pathlib.Path, job: dict) -> None:
        self.name, self.log, self.about = name, log, None
        ours, theirs = os.pipe()
        command = [sys.executable, str(HERE), "--child", json.dumps(job), "--reply", str(theirs)]
        how = {"pass_fds": [theirs], "env": {**os.environ, **ENVIRONMENT}, "start_new_session": True}
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, **how)
        os.close(theirs)
        self.lines: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, args=[ours], daemon=True).start()

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _answer(self, seconds: float) -> dict:
        try:
            answer = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.end()
            answer = {"error": f"no answer within {seconds:.0f} s: {self.tail()}"}
        if answer is None:
            raise Failed(f"{self.name}: the engine ended ({self.process.poll()}): {self.tail()}")
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def ready(self) -> None:
        if self.about is None:
            self.about = self._answer(200)
            say(event="ready", engine=self.name, **self.about)

    def do(self, **order) -> dict:
        self.ready()
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(f"{self.name}: the engine is gone: {self.tail()}") from None
        return self._answer(60)

    def ask(self, *prompts, **order) -> dict:
        return self.do(prompts=[one if isinstance(one, list) else [one] for one in prompts], **order)

    def each(self, prompts: Iterable, forget: bool = False) -> list[dict]:
        """Asks for one prompt at a time: a batch of another shape rounds otherwise."""
        asked = [self.ask(one, tokens=8, logprobs=8, forget=forget and at == 0) for at, one in enumerate(prompts)]
        return [one["answers"][0] for one in asked]

    def stats(self) -> dict:
        return self.do(stats=True)["stats"]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3500:]

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else's
            self.process.wait()


def say(**row) -> None:
    print(json.dumps({"at": round(time.monotonic() - START, 1), **row}), flush=True)


def compare(some: list[dict], others: list[dict]) -> dict:
    """Answers beside those that they should equal. Log-probabilities are compared up to the first token that differs."""
    furthest, equal, exact, first = 0.0, True, True, []
    for one, other in zip(some, others, strict=True):
        equal &= one["tokens"] == other["tokens"]
        exact &= one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]
        for at, (mine, theirs) in enumerate(zip(one["logprobs"], other["logprobs"])):
            apart = [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
            furthest = max([furthest, *apart])
            if at == 0:
                first.append(max(apart, default=99.0))
            if one["tokens"][at] != other["tokens"][at]:
                break
    apart = {"logprob_difference": furthest, "first_token_difference": max(first, default=None)}
    return {"tokens_equal": equal, "exact": exact, **apart}


def row_of(what: str, **parts: tuple[list[dict], list[dict]]) -> dict:
    """A case's row: for each part how its answers compare with others, and how many of their tokens were cached."""
    row: dict = {"ok": True, "what": what}
    for name, (some, others) in parts.items():
        row[name], row[f"{name}_cached"] = compare(some, others), [one["cached"] for one in some]
    return row


def median(values: Iterable[float]) -> float | None:
    values = list(values)
    return round(statistics.median(values), 5) if values else None


def rates(jobs: list, kind: str) -> dict:
    """Bytes a second of the larger half of jobs, from their start to when the worker heard of their end."""
    mine = sorted((size, seconds) for what, size, seconds in jobs if what == kind)
    rate = [size / seconds / 1e9 for size, seconds in mine[len(mine) // 2 :]]
    row = {"jobs": len(mine), "gb": round(sum(size for size, _ in mine) / 1e9, 3), "gb_per_s": median(rate)}
    row |= {"largest_mb": max((size / 1e6 for size, _ in mine), default=None), "gb_per_s_best": max(rate, default=None)}
    return {f"{kind}_{name}": value for name, value in row.items()}


class Lab:
    """The hosts, the engines, and the cases in the order in which they run."""

    # Of the correctness cases: (seed, tokens). The last is computed in two steps.
    prompts = ((1, 200), (2, 500), (3, 1000), (4, 3000))

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path) -> None:
        self.given, self.folder, self.block = given, folder, given.block
        self.out = pathlib.Path(given.out or folder)
        self.out.mkdir(parents=True, exist_ok=True)
        self.lengths = [int(one) for one in given.lengths.split(",")]
        self.engines: list[Engine] = []
        self.bigs: dict[str, Engine] = {}
        self.hosts, self.results = [], {}
        self.want = [self.whole(length) for _, length in self.prompts]
        self.halves = [(seed, max(self.block, length // 2 // self.block * self.block)) for seed, length in self.prompts]
        for name, size in SIZES.items():
            config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **dict(zip(SHAPE, size))}
            config |= {"head_dim": HEAD, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
            config |= {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))

    def per_token(self, which: str) -> int:
        """Bytes of KV: 2 (K, V) x layers x kv_heads x head_dim x 2 of bfloat16."""
        return 2 * SIZES[which][0] * SIZES[which][3] * HEAD * 2

    def whole(self, tokens: int) -> int:
        """Tokens of a prompt that are in whole blocks, without the last one."""
        return (tokens - 1) // self.block * self.block

    def host(self, name: str, pool: str):
        import host as hosts

        (self.folder / name).mkdir()
        # The tests' hosts do not scrub. This one does, as is the default.
        self.hosts.append(hosts.Host(self.folder / name, pool, {"store.scrub_rate": "32MiB"}))
        return self.hosts[-1].start()

    def engine(self, name: str, which: str, host=None, tier_bytes: int = 0) -> Engine:
        """With the connector to a host if there is one, or with the tier if there are bytes for vLLM's own above it."""
        longest, extra = max(self.lengths), None
        more = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.08}
        if which == "big":
            more = {"max_model_len": longest + 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.12}
        tokens = 16384 if which == "tiny" else max(4 * longest, 16384)
        more |= {"kv_cache_memory_bytes": tokens * self.per_token(which), "num_gpu_blocks_override": None}
        more |= {"load_format": "dummy", "dtype": "bfloat16", "seed": 0, "block_size": self.block, "max_num_seqs": 16}
        more |= {"distributed_executor_backend": "uni"}
        if self.given.sync:
            more["async_scheduling"] = False
        if self.given.backend:
            more["attention_config"] = {"backend": self.given.backend}
        if tier_bytes:
            below = {"type": "KvasirTier", "module_path": "kvasir.vllm", "host": host.address, "model_id": "gpu-tier"}
            tiers = {"cpu_bytes_to_use": tier_bytes, "secondary_tiers": [below | PATIENCE]}
            transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            transfer["kv_load_failure_policy"] = "recompute"
            transfer["kv_connector_extra_config"] = {"spec_name": "TieringOffloadingSpec", **tiers}
            more["kv_transfer_config"] = transfer
        elif host:
            extra = {"host": host.address, "model_id": "gpu", "save_share": 1.0, **PATIENCE}
        job = {"model": str(self.folder / which), "width": SIZES[which][1], "extra": extra, "more": more}
        job["kind"] = "tier" if tier_bytes else "connector" if host else None
        self.engines.append(Engine(name, self.out / f"{name}.log", job))
        return self.engines[-1]

    def result(self, name: str, **row) -> None:
        self.results[name] = row
        say(case=name, **row)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))

    def failed(self, name: str, error: Exception) -> None:
        text = str(error) if isinstance(error, Failed) else "".join(traceback.format_exception(error))
        self.result(name, ok=False, error=text[-3900:])

    def run(self, name: str, case: Callable[..., dict], *arguments) -> None:
        if time.monotonic() - START > self.given.seconds:
            self.result(name, ok=False, error="no time left")
            return
        try:
            self.result(name, **case(*arguments))
        except Exception as error:
            self.failed(name, error)

    def ref(self) -> dict:
        engine = self.tinies["ref"]
        engine.each(self.prompts)
        self.cold, self.local = engine.each(self.prompts, forget=True), engine.each(self.prompts)
        again, local = engine.each(self.prompts, forget=True), engine.each(self.prompts)
        half, changed = [], []
        for part, whole in zip(self.halves, self.prompts, strict=True):
            engine.ask([part, (99, 8)], forget=True)
            half += engine.each([whole])
        # Another first block, and the rest the same: what wrong KV of one block does to the answer.
        for one in self.prompts:
            made = engine.ask([(77, self.block), one], tokens=8, logprobs=8, forget=True)["answers"]
            straight = engine.ask([(78, self.block), one], tokens=8, logprobs=8)["answers"]
            changed.append(compare(made, straight)["first_token_difference"])
        pairs = {
            "hit_twice": (self.local, local),
            "hit_as_cold": (self.local, self.cold),
            "half_as_hit": (half, self.local),
        }
        row = row_of("no connector: twice, cold and with vLLM's own cache", cold_twice=(self.cold, again), **pairs)
        row["one_other_block_changes_logprobs_by"], noise = changed, row["cold_twice"]
        row["ok"] = noise["tokens_equal"] and min(changed) > max(10 * noise["logprob_difference"], 0.01)
        return row

    def connector(self) -> dict:
        engine = self.tinies["connector"]
        cold, hit = engine.each(self.prompts, forget=True), engine.each(self.prompts, forget=True)
        stats, got, external = engine.stats(), [], []
        for half, whole in zip(self.halves, self.prompts, strict=True):
            # The first half comes from the host, and then lies in vLLM's cache as after any hit.
            engine.ask([half, (99, 8)], forget=True)
            before = engine.stats().get("hit_tokens", 0)
            got += engine.each([whole])
            external.append(engine.stats().get("hit_tokens", 0) - before)
        # Several at once: the shapes of steps differ, so tokens may too.
        batch = engine.ask(*self.prompts, tokens=8, logprobs=8, forget=True)["answers"]
        parts = {"cold": (cold, self.cold), "hit": (hit, self.local), "half": (got, self.local)}
        row = row_of("cold, all from the host, half of it", **parts, batch=(batch, self.local))
        row |= {"hit_want": self.want, "half_external_tokens": external, "stats": stats, "stats_end": engine.stats()}
        row["half_external_want"] = [want - half for want, (_, half) in zip(self.want, self.halves, strict=True)]
        row["ok"] = all(row[name]["tokens_equal"] for name in parts) and row["hit_cached"] == self.want
        row["ok"] &= external == row["half_external_want"]
        row["ok"] &= not any(row["stats_end"].get(name) for name in ("load_failed_requests", "save_failed_blocks"))
        return row

    def second(self) -> dict:
        if "connector" not in self.results:
            self.tinies["connector"].each(self.prompts)
        row = row_of("another process", hit=(self.tinies["second"].each(self.prompts), self.local))
        row["ok"] = row["hit"]["tokens_equal"] and row["hit_cached"] == self.want
        return {**row, "stats": self.tinies["second"].stats()}

    def kill(self) -> dict:
        engine, before = self.tinies["kill"], self.tinies["kill"].each(self.prompts, forget=True)
        engine.do(forget=True, kill=self.mortal.process.pid)
        during = engine.ask(self.prompts[-2], tokens=8, logprobs=8)
        after = engine.ask(self.prompts[-1], tokens=8, logprobs=8, forget=True)
        parts = {"during": (during["answers"], self.cold[-2:-1]), "after": (after["answers"], self.cold[-1:])}
        row = row_of("the host is killed during a load; the engine goes on", before=(before, self.cold), **parts)
        row |= {"during_seconds": round(during["seconds"], 3), "fired": after["fired"], "stats": engine.stats()}
        row["ok"] = all(row[name]["tokens_equal"] for name in parts) and len(row["fired"]) == 2
        row["ok"] &= row["stats"].get("load_failed_requests") == 1
        return row

    def tier(self) -> dict:
        one, two = self.tinies["tier"], self.tinies["tier-other"]
        cold, hit = one.each(self.prompts, forget=True), one.each(self.prompts, forget=True)
        for at in range(3):  # stores below vLLM's tier go on in the background
            one.ask((500 + at, 64), tokens=2)
            time.sleep(0.3)
        stats = one.stats()
        parts = {"cold": (cold, self.cold), "hit": (hit, self.local), "other": (two.each(self.prompts), self.local)}
        row = row_of("KvasirTier: cold, hit in vLLM's own host memory, other process (Kvasir)", **parts)
        row |= {"stats": stats, "other_stats": two.stats()}
        row["ok"] = (
            all(row[name]["tokens_equal"] for name in parts) and min(row["hit_cached"] + row["other_cached"]) > 0
        )
        row["ok"] &= row["other_stats"].get("tier_submit_load_jobs", 0) > 0
        return row

    def ttft(self, length: int) -> dict:
        # Not whole blocks, so that vLLM's own hits and Kvasir's leave the same to compute.
        first, length, rounds = 10_000 + 1000 * self.lengths.index(length), length - 8, self.given.rounds
        # A hit of the tier comes from vLLM's own host memory.
        kinds = {"without": ["cold", "local hit"], "kvasir": ["cold", "hit", "local hit"], "tier": ["cold", "hit"]}
        names, seconds, answers = list(self.bigs), defaultdict(list), defaultdict(list)
        for turn in range(-1, rounds):  # the first is not counted
            for name in names if turn % 2 else names[::-1]:
                for kind in kinds[name]:
                    order = {"tokens": 1, "logprobs": 4, "forget": kind != "local hit"}
                    got = self.bigs[name].ask((first + turn, length), **order)
                    if turn >= 0:
                        seconds[f"{name} {kind}"].append(got["seconds"])
                        answers[f"{name} {kind}"] += got["answers"]
        row = row_of(f"seconds to the first token, {length} tokens, medians of {rounds}")
        row["seconds"] = {name: median(values) for name, values in sorted(seconds.items())}
        row["all"] = {name: [round(one, 4) for one in values] for name, values in sorted(seconds.items())}
        row["cached"] = {name: sorted({one["cached"] for one in got}) for name, got in sorted(answers.items())}
        for name, base in [("kvasir cold", "cold"), ("kvasir hit", "local hit"), ("tier hit", "local hit")]:
            if name in answers:
                row[f"{name} as without"] = compare(answers[name], answers[f"without {base}"])
        if "kvasir" in self.bigs:
            took = self.bigs["kvasir"].do(stats=True)
            row |= rates(took["jobs"], "load") | rates(took["jobs"], "save") | {"stats": took["stats"]}
            row["ok"] = row["kvasir hit as without"]["tokens_equal"]
            row["ok"] &= row["cached"]["kvasir hit"] == [self.whole(length)]
            for kind in kinds["kvasir"]:
                pairs = zip(seconds["without cold"], seconds[f"kvasir {kind}"], strict=True)
                row[f"without cold / kvasir {kind}"] = median(cold / other for cold, other in pairs)
        return row

    def throughput(self) -> dict:
        names = [name for name in ("without", "kvasir") if name in self.bigs]
        length, tokens, wall, work, seconds, equal = 1024, 64, [], [], defaultdict(list), True
        for turn in range(-1, self.given.rounds):  # the first is not counted
            prompts, got = [(50_000 + 100 * turn + at, length) for at in range(8)], {}
            for name in names if turn % 2 else names[::-1]:
                got[name] = self.bigs[name].ask(*prompts, tokens=tokens, forget=True)
            if turn < 0:
                continue
            for name in names:
                seconds[name].append(got[name]["seconds"])
                equal &= compare(got[name]["answers"], got["without"]["answers"])["tokens_equal"]
            if "kvasir" in names:
                wall.append(got["without"]["seconds"] / got["kvasir"]["seconds"])
                work.append(got["without"]["cpu"] / got["kvasir"]["cpu"])
        row = row_of(f"8 prompts of {length} tokens and {tokens} new ones each, no hits") | {"tokens_equal": equal}
        row["seconds"] = {name: median(values) for name, values in seconds.items()}
        row["tokens_per_s"] = {name: round(8 * (length + tokens) / value) for name, value in row["seconds"].items()}
        row |= {"without / kvasir": median(wall), "all": [round(one, 3) for one in wall]}
        row["without / kvasir, processor time"] = median(work)
        if "kvasir" in names:
            took = self.bigs["kvasir"].do(stats=True)
            row |= rates(took["jobs"], "save") | {"stats": took["stats"]}
        return row

    def all(self) -> None:
        """Small engines start at once, and each is waited for where it is needed; the timed ones while small cases run."""
        cases = CASES if self.given.cases == "all" else self.given.cases.split(",")
        shared = self.host("t", "2GiB")
        self.tinies = {"ref": self.engine("ref", "tiny")}
        if {"connector", "second"} & set(cases):
            self.tinies["connector"] = self.engine("connector", "tiny", shared)
        if "second" in cases:
            self.tinies["second"] = self.engine("second", "tiny", shared)
        if "kill" in cases:
            self.mortal = self.host("m", "2GiB")
            self.tinies["kill"] = self.engine("kill", "tiny", self.mortal)
        if "tier" in cases:
            for name in ("tier", "tier-other"):
                self.tinies[name] = self.engine(name, "tiny", shared, tier_bytes=512 << 20)
        self.run("ref", self.ref)
        if "connector" in cases:
            self.run("connector", self.connector)
        if {"ttft", "throughput"} & set(cases):
            host = self.host("b", self.given.pool)
            self.bigs = {"without": self.engine("big-without", "big"), "kvasir": self.engine("big-kvasir", "big", host)}
            if "tier" in cases:  # vLLM's own memory has room for two prompts and a half
                room = int(2.5 * max(self.lengths) * self.per_token("big"))
                self.bigs["tier"] = self.engine("big-tier", "big", host, tier_bytes=room)
        for name, case in [("second", self.second), ("kill", self.kill), ("tier", self.tier)]:
            if name in cases:
                self.run(name, case)
        for one in self.tinies.values():  # what follows is timed: nobody else computes
            one.end()
        for name, one in list(self.bigs.items()):
            try:
                one.ready()
            except Failed as error:
                self.failed(f"big {name}", error)
                del self.bigs[name]
        if "without" in self.bigs:
            for length in self.lengths if "ttft" in cases else []:
                self.run(f"ttft {length}", self.ttft, length)
            if "throughput" in cases:
                self.run("throughput", self.throughput)

    def close(self) -> None:
        for one in self.engines:
            one.end()
        for one in self.hosts:
            one.kill()
            if self.out != self.folder:
                shutil.copy(one.folder / "host.log", self.out / f"host-{one.folder.name}.log")

    def table(self) -> None:
        print("\ncase                    ok     what")
        for name, row in self.results.items():
            print(f"{name:22}  {'yes' if row['ok'] else 'NO ':5}  {row.get('what', row.get('error', ''))[:150]}")
        for name, row in self.results.items():
            for what, seconds in row.get("seconds", {}).items():
                print(f"{name:22}  {what:40} {seconds:.4f} s")
            for what in sorted(one for one in row if "gb_per_s" in one or one.startswith("without")):
                print(f"{name:22}  {what:40} {row[what]}")
        print(f"\n{time.monotonic() - START:.0f} s in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="all", help=f"of {','.join(CASES)}; ref always runs")
    parser.add_argument("--backend", help="of attention, such as TRITON_ATTN; vLLM's own choice if not given")
    parser.add_argument("--lengths", default="2048,8192,16384", help="of the timed prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=460, help="after this no further case begins")
    parser.add_argument("--block", type=int, default=16, help="block_size_tokens")
    parser.add_argument("--pool", default="12GiB", help="of the host of the timed engines")
    parser.add_argument("--sync", action="store_true", help="no asynchronous scheduling")
    parser.add_argument("--out", help="a folder for logs and results; they are removed at the end if not given")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--reply", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with os.fdopen(given.reply, "w") as pipe:
            child(json.loads(given.child), lambda row: print(json.dumps(row), file=pipe, flush=True))
        return
    if named := os.environ.get("KVASIR_BIN"):  # also a name on the PATH
        os.environ["KVASIR_BIN"] = shutil.which(named) or os.path.abspath(named)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True) as folder:
        lab = Lab(given, pathlib.Path(folder))

        def late() -> None:
            say(event="out of time", results=list(lab.results))
            lab.close()
            lab.table()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(3)

        timer = threading.Timer(given.seconds + 60, late)
        timer.daemon = True
        timer.start()
        try:
            lab.all()
        except Exception as error:
            lab.failed("run", error)
        finally:
            timer.cancel()
            lab.close()
            lab.table()


if __name__ == "__main__":
    main()
