"""The example proxy between engines that are not there: whom it asks what, and when."""

import asyncio
import importlib.util
import json
import pathlib

import pytest

pytest.importorskip("fastapi", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")
httpx = pytest.importorskip("httpx", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "disaggregated_proxy.py"
HANDED = {"do_remote_prefill": True, "transfer_id": "x"}
TOO_SHORT = {"do_remote_prefill": False, "do_remote_decode": False}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("disaggregated_proxy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_of_decode(example, answer, *, comes):
    """Whether each request that decode got was one that waits. Such a one is answered only where the prompt comes."""

    async def run():
        waits, judged = [], asyncio.Event()

        async def engines(request):
            if request.url.host == "prefill":
                return answer
            waits.append("kv_transfer_params" in json.loads(request.content))
            await (judged if comes or not waits[-1] else asyncio.Event()).wait()
            return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

        class Proxy(example.Proxy):
            async def _prefill(self, *of):
                while not waits:
                    await asyncio.sleep(0)
                try:
                    await super()._prefill(*of)
                finally:
                    judged.set()

        proxy = Proxy("http://prefill", "http://decode", "decode")
        proxy.client = httpx.AsyncClient(transport=httpx.MockTransport(engines))
        gone = asyncio.create_task(asyncio.Event().wait())
        response = await asyncio.wait_for(proxy.answer("/v1/completions", {"prompt": [1]}, {}, gone), 60)
        gone.cancel()
        assert response.status_code == 200
        return waits

    return asyncio.run(run())


@pytest.mark.parametrize("params", [HANDED, TOO_SHORT], ids=["handed over", "too short"])
def test_decode_is_asked_once(example, params):
    answer = httpx.Response(200, json={"kv_transfer_params": params})
    assert asked_of_decode(example, answer, comes=True) == [True]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"kv_transfer_params": None}),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json=[]),
        httpx.Response(200, text="no JSON"),
        httpx.Response(503, text="busy"),
    ],
    ids=["null", "absent", "a list", "no JSON", "an error"],
)
def test_decode_is_asked_again_where_prefill_hands_nothing_over(example, answer):
    assert asked_of_decode(example, answer, comes=False) == [True, False]
