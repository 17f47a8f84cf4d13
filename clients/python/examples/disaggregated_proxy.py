"""Prefill in one vLLM, decode in another: a proxy that shows how to ask for it, not one for production.

    python disaggregated_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --decode-host decode

Both engines get a request at once. The prefill engine generates one token and hands the KV of the prompt over while it is
computed; the decode engine waits for that and answers. Where prefill fails, or says that it hands nothing over, decode is
asked again to compute all itself, as long as nothing of its answer was sent on.

fastapi, httpx and uvicorn are in the environment of vLLM.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator

import fastapi
import httpx
import uvicorn
from fastapi.responses import JSONResponse, StreamingResponse

logger = logging.getLogger("uvicorn.error")

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "max_completion_tokens")
"""Fields that ask for more than the one token that the prefill engine generates."""


class Failed(Exception):
    """An engine that gave no answer, for whoever called the proxy."""


class Proxy:
    """Two engines, and the name that the prefill engine's Kvasir host has for the decode engine's."""

    def __init__(self, prefill: str, decode: str, decode_host: str) -> None:
        self.prefill, self.decode, self.decode_host = prefill.rstrip("/"), decode.rstrip("/"), decode_host
        # An answer takes as long as it takes.
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5), limits=httpx.Limits(max_connections=None)
        )

    async def answer(self, path: str, body: dict, headers: dict, gone: asyncio.Task) -> fastapi.Response:
        """The decode engine's answer to a request. `gone` ends when nobody waits for it any more."""
        transfer = f"xfer-{uuid.uuid4().hex}"
        plain = {name: value for name, value in body.items() if name != "kv_transfer_params"}
        if several(plain):
            # A transfer is of one prompt.
            return await self._within(gone, self._decode(path, plain, headers))
        prefill = asyncio.create_task(self._prefill(path, plain, headers, transfer))
        asked = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
        decode = asyncio.create_task(self._decode(path, plain | {"kv_transfer_params": asked}, headers))
        try:
            await asyncio.wait({prefill, decode, gone}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and prefill.exception() and not decode.done() and not gone.done():
                logger.warning("%s; %s computes it all", prefill.exception(), self.decode)
                decode.cancel()
                decode = asyncio.create_task(self._decode(path, plain, headers))
            return await self._within(gone, decode)
        finally:
            # Its answer is of no use any more, and an engine ends requests whose connection is closed.
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    @staticmethod
    async def _within(gone: asyncio.Task, answer) -> fastapi.Response:
        """An answer, unless the caller has left: the engine then ends the request as well."""
        answer = asyncio.ensure_future(answer)
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise Failed("the caller has left")
        return answer.result()

    async def _prefill(self, path: str, body: dict, headers: dict, transfer: str) -> None:
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        if self.decode_host:
            asked["remote_host"] = self.decode_host
        one = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        one |= {"max_tokens": 1, "stream": False, "kv_transfer_params": asked}
        try:
            response = await self.client.post(self.prefill + path, json=one, headers=headers)
        except httpx.HTTPError as error:
            raise Failed(f"the prefill engine at {self.prefill} does not answer: {error!r}") from error
        if response.status_code != 200:
            raise Failed(f"the prefill engine at {self.prefill} answers {response.status_code}: {response.text[:500]}")
        try:
            handed = response.json()["kv_transfer_params"]
        except (ValueError, KeyError, TypeError):
            handed = None
        # Not null for prompts that are too short to be handed over: decode does not wait for these.
        if handed is None:
            raise Failed(f"the prefill engine at {self.prefill} hands nothing over; its log says why")

    async def _decode(self, path: str, body: dict, headers: dict) -> fastapi.Response:
        """Returns with the first bytes of the answer, so that until then the request can be made again."""
        request = self.client.build_request("POST", self.decode + path, json=body, headers=headers)
        try:
            response = await self.client.send(request, stream=True)
            pieces = response.aiter_raw()
            try:
                first = await anext(pieces, b"")
            except BaseException:
                await response.aclose()
                raise
        except httpx.HTTPError as error:
            raise Failed(f"the decode engine at {self.decode} does not answer: {error!r}") from error

        async def passed_on() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(response):
                yield first
                async for piece in pieces:
                    yield piece

        kept = {name: response.headers[name] for name in ("content-type",) if name in response.headers}
        return StreamingResponse(passed_on(), status_code=response.status_code, headers=kept)


def several(body: dict) -> bool:
    """Whether a completion has more than one prompt: a list of texts, or of lists of tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def failure(status: int, text: str) -> JSONResponse:
    """An error in the form that OpenAI's clients read."""
    return JSONResponse({"error": {"message": text, "type": "proxy_error", "code": status}}, status_code=status)


async def left(request: fastapi.Request) -> None:
    """Returns when the caller has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(proxy: Proxy) -> fastapi.FastAPI:
    app = fastapi.FastAPI()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: fastapi.Request) -> fastapi.Response:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            return failure(400, f"the request is no JSON: {error}")
        if not isinstance(body, dict):
            return failure(400, "the request is no JSON object")
        passed = {name: request.headers[name] for name in ("authorization", "x-request-id") if name in request.headers}
        gone = asyncio.create_task(left(request))
        try:
            return await proxy.answer(request.url.path, body, passed, gone)
        except Failed as error:
            return failure(502, str(error))
        finally:
            gone.cancel()

    @app.get("/health")
    async def health() -> dict:
        return {}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", required=True, help="address of the vLLM that computes prompts")
    parser.add_argument("--decode", required=True, help="address of the vLLM that answers")
    parser.add_argument(
        "--decode-host", default="", help="node.name of decode's Kvasir host; without it, prefill's hand_over_to"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(application(Proxy(given.prefill, given.decode, given.decode_host)), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
