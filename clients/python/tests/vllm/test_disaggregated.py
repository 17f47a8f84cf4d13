"""Two vLLM servers, each with a host, and the example proxy before them: as the documentation starts them.

The decode engine answers with what an engine without a connector would, to the last bit, and computes less than a block of
each prompt; and with all of it computed by itself once the prefill engine is gone.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

import host as hosts
import tiny
from engine import BLOCK, prompt

PROXY = pathlib.Path(__file__).resolve().parents[2] / "examples" / "disaggregated_proxy.py"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
PROMPTS = [prompt(0), prompt(1, 300), prompt(2, 4 * BLOCK), prompt(3), prompt(4), prompt(5)]


class Server:
    """A program that serves HTTP, until the test is over."""

    def __init__(self, name, folder, words, **environment):
        (self.port,) = hosts._free_ports(1)
        self.log = folder / f"{name}.log"
        self.address = f"http://127.0.0.1:{self.port}"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait(self):
        until = time.monotonic() + 400
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.address + "/health", timeout=10):
                return self
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, f"{self.address} does not start: {self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    def post(self, path, **body):
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name, having=""):
        with urllib.request.urlopen(self.address + "/metrics", timeout=60) as page:
            rows = page.read().decode().splitlines()
        return sum(float(row.split()[-1]) for row in rows if row.startswith(name) and having in row)

    def kill(self):
        """Ends it and the processes it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture(scope="module")
def served(folder, model):
    """The prefill engine, the decode engine and the proxy."""
    if hosts.binary() is None:
        pytest.skip("no kvasir program; build it, or set KVASIR_BIN")
    tiny.write_tokenizer(pathlib.Path(model))
    place = folder / "disaggregated"
    place.mkdir()
    pair = hosts.pair(place)
    servers = []
    try:
        for host in pair:
            settings = {"host": host.address, "model_id": "tiny", "match_ms": 5000, "save_share": 1.0}
            transfer = {
                "kv_connector": "KvasirConnector",
                "kv_connector_module_path": "kvasir.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # Only the decode engine waits, and only as long as a test that fails.
                "kv_connector_extra_config": settings | {"hand_over_ms": 120_000},
            }
            # What `vllm serve` runs; that itself wants a distribution called vllm, and vllm-cpu is called otherwise.
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
            command += ["--served-model-name", "tiny"]
            options = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", f"--block-size={BLOCK}"]
            options += ["--num-gpu-blocks-override=24", "--max-num-seqs=8"]
            options += ["--kv-transfer-config", json.dumps(transfer)]
            servers.append(Server(f"engine-{len(servers)}", place, command + options, **QUIET))
        prefill, decode = servers
        words = [sys.executable, PROXY, "--prefill", prefill.address, "--decode", decode.address]
        servers.append(Server("proxy", place, [*words, "--decode-host", "decode"]))
        for one in servers:
            one.wait()
        yield servers
    finally:
        for one in (*servers, *pair):
            one.kill()


@pytest.fixture(scope="module")
def right(elsewhere):
    """What an engine without a connector generates, each prompt by itself."""
    return elsewhere(PROMPTS)


def asked(tokens):
    return {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def same(answer, right, within=0.0):
    """Equal tokens and log-probabilities, to the last bit unless `within` says otherwise."""
    (choice,) = answer["choices"]
    assert choice["token_ids"] == right["tokens"]
    for ours, theirs in zip(choice["logprobs"]["top_logprobs"], right["logprobs"], strict=True):
        assert len(ours) >= 5
        assert max(abs(value - theirs[token.removeprefix("token_id:")]) for token, value in ours.items()) <= within


def computed(server):
    """Tokens of prompts that an engine has computed itself."""
    return server.metric("vllm:prompt_tokens_by_source_total", 'source="local_compute"')


@contextlib.contextmanager
def handed_over(prefill, decode, tokens):
    """All full blocks of the prompt come from the prefill engine, and the decode engine computes the rest alone."""
    whole = tokens // BLOCK
    before = computed(decode), decode.metric("vllm:kvasir_arrive_blocks_total")
    sent = prefill.metric("vllm:kvasir_hand_over_blocks_total")
    yield
    assert decode.metric("vllm:kvasir_arrive_blocks_total") - before[1] == whole
    assert computed(decode) - before[0] == tokens - whole * BLOCK or tokens % BLOCK == 0
    assert computed(decode) - before[0] < BLOCK
    until = time.monotonic() + 60
    while prefill.metric("vllm:kvasir_hand_over_blocks_total") - sent != whole:
        assert time.monotonic() < until, "the prefill engine does not count what it handed over"
        time.sleep(0.1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_both_at_once_through_the_proxy(served, right, which):
    """Prompts with a rest of a block, and one without."""
    prefill, decode, proxy = served
    tokens = PROMPTS[which]
    with handed_over(prefill, decode, len(tokens)):
        status, answer = proxy.post("/v1/completions", **asked(tokens))
    assert status == 200, answer
    # Of whole blocks the last token alone is computed again, and kernels round otherwise in a step of one token.
    same(json.loads(answer), right[which], within=0.0 if len(tokens) % BLOCK else 1e-3)


def test_prefill_first_as_proxies_for_nixl_ask(served, right):
    prefill, decode, _ = served
    empty = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_port"])
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": "decode"} | empty
    with handed_over(prefill, decode, 200):
        status, first = prefill.post(
            "/v1/completions", **asked(PROMPTS[3]) | {"max_tokens": 1, "kv_transfer_params": params}
        )
        assert status == 200, first
        passed_on = json.loads(first)["kv_transfer_params"]
        assert passed_on["do_remote_prefill"] and passed_on["transfer_id"]
        status, answer = decode.post("/v1/completions", **asked(PROMPTS[3]) | {"kv_transfer_params": passed_on})
    assert status == 200, answer
    same(json.loads(answer), right[3])


def test_chat_and_streams(served):
    prefill, decode, proxy = served
    said = {"messages": [{"role": "user", "content": " ".join(f"w{token}" for token in prompt(9, 198))}]}
    more = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    with handed_over(prefill, decode, 200):
        status, whole = proxy.post("/v1/chat/completions", **said, **more)
    assert status == 200, whole
    text = json.loads(whole)["choices"][0]["message"]["content"]
    status, stream = proxy.post("/v1/chat/completions", **said, **more, stream=True)
    assert status == 200
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(deltas) == text and text


def test_errors_of_engines_reach_the_caller(served):
    proxy = served[2]
    status, answer = proxy.post("/v1/completions", **asked(prompt(1, 600)))
    assert status == 400 and b"512" in answer, "what the engine says of a prompt that is too long"
    status, answer = proxy.post("/v1/completions", model="another", prompt=[3, 4])
    assert status == 404, answer


def test_without_prefill_decode_computes_and_without_decode_there_is_an_error(served, right):
    """The last test: it ends both engines."""
    prefill, decode, proxy = served
    prefill.kill()
    before = computed(decode)
    status, answer = proxy.post("/v1/completions", **asked(PROMPTS[4]))
    assert status == 200, answer
    same(json.loads(answer), right[4])
    assert computed(decode) - before == 200
    decode.kill()
    status, answer = proxy.post("/v1/completions", **asked(PROMPTS[5]))
    assert status == 502 and decode.address in json.loads(answer)["error"]["message"]
