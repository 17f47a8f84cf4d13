"""A vLLM engine on the CPU, in this process, whose steps a test can take one by one.

Run as a program it is another engine: it reads `{"model", "extra", "prompts", …}` from standard input and prints what it
generated as the last line.
"""

import json
import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_CPU_KVCACHE_SPACE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
if __name__ != "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

BLOCK = 32


def prompt(seed: int, tokens: int = 200) -> list[int]:
    """Tokens of a prompt that shares no block with one of another seed."""
    return [(7 * at + 131 * seed + 3) % 1000 + 3 for at in range(tokens)]


class Answer:
    """What a request generated."""

    def __init__(self, output) -> None:
        generated = output.outputs[0]
        self.tokens = list(generated.token_ids)
        self.cached = output.num_cached_tokens
        self.logprobs = [{str(token): one.logprob for token, one in step.items()} for step in generated.logprobs]

    def same_as(self, other: "Answer | dict") -> None:
        """Equal tokens and log-probabilities, to the last bit."""
        theirs = other if isinstance(other, dict) else vars(other)
        assert self.tokens == theirs["tokens"]
        assert self.logprobs == theirs["logprobs"]


def sampling(tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=8)


def options(model: str, extra: dict | None, blocks: int = 24, **more) -> dict:
    """Arguments of `LLM`, with the connector if there are settings for it."""
    transfer = {
        "kv_connector": "KvasirConnector",
        "kv_connector_module_path": "kvasir.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": BLOCK,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        **({"kv_transfer_config": transfer} if extra is not None else {}),
        **more,
    }


class Engine:
    """An engine in this process, with the connector."""

    def __init__(self, model: str, extra: dict, **more) -> None:
        self.llm = LLM(**options(model, extra, distributed_executor_backend="uni", **more))
        self.front = self.llm.llm_engine
        self.core = self.front.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.half = self.scheduler.connector.scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group().worker
        self.next = 0

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def settle(self) -> None:
        """Steps until no save is under way and every block is free again."""
        while self.scheduler.has_requests():
            self.core.step()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "a block is held for ever"
        assert not self.half._holds and not self.half._loading and not self.half._tracked
        assert not self.worker._running and not self.worker._loading and not self.worker._bad_requests

    def ask(self, *prompts: list[int], tokens: int = 4) -> list[Answer]:
        """Generates for all prompts at once and leaves the engine with nothing under way."""
        outputs = self.llm.generate([{"prompt_token_ids": one} for one in prompts], sampling(tokens), use_tqdm=False)
        self.settle()
        return [Answer(output) for output in outputs]

    def forget(self) -> None:
        """Empties vLLM's own prefix cache, and no other."""
        assert self.llm.reset_prefix_cache()

    def add(self, tokens: list[int], generate: int = 4) -> str:
        self.next += 1
        name = f"by-hand-{self.next}"
        self.front.add_request(name, {"prompt_token_ids": tokens}, sampling(generate))
        return name

    def finish(self) -> list[Answer]:
        """Takes steps until all requests that were added have ended."""
        done = []
        while self.front.has_unfinished_requests():
            done += [output for output in self.front.step() if output.finished]
        self.settle()
        return [Answer(output) for output in done]

    def counts(self) -> dict[str, int]:
        """Everything counted so far. vLLM takes counters at every step, so they are kept here."""
        return dict(self._counted)

    def count(self) -> None:
        """Begins to keep counters."""
        from collections import Counter

        self._counted: Counter[str] = Counter()
        for half in (self.half, self.worker):
            take = half.stats

            def kept(take=take):
                stats = take()
                self._counted.update(stats.data if stats else {})
                return stats

            half.stats = kept


def main() -> None:
    job = json.loads(sys.stdin.read())
    llm = LLM(**options(job["model"], job["extra"], job.get("blocks", 24), **job.get("more", {})))
    answers = []
    for turn in range(2 if job.get("twice") else 1):
        # Refused while the last saves hold their blocks.
        while turn and not llm.reset_prefix_cache():
            pass
        # One at a time: a batch of another shape rounds otherwise, and equal is to mean equal.
        for one in job["prompts"]:
            answers += llm.generate({"prompt_token_ids": one}, sampling(job.get("tokens", 4)), use_tqdm=False)
    print(json.dumps([vars(Answer(output)) for output in answers]), flush=True)


if __name__ == "__main__":
    main()
