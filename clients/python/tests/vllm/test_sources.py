"""vLLM's metrics say from which tier of the host a hit came."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

from engine import prompt
from rig import BLOCK, Rig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvasir import Unavailable
from kvasir.vllm.messages import HASH_BYTES
from kvasir.vllm.sources import sources


def test_a_hit_of_the_pool_is_the_hosts(model, settings):
    rig = Rig(model, settings)
    rig.ask(prompt(1))
    rig.forget()
    asked = []
    connector = rig.connector
    whole = connector.get_external_cache_hit_sources

    def listen(request, tokens):
        asked.append((tokens, whole(request, tokens)))
        return asked[-1][1]

    connector.get_external_cache_hit_sources = listen
    rig.ask(prompt(1))
    assert asked == [(192, {CacheHitSource.HOST: 192})]


class Told:
    """A core of which only the answer matters."""

    def __init__(self, answer):
        self.answer = answer

    def tiers(self, namespace, hashes, hash_bytes):
        assert hash_bytes == HASH_BYTES
        if isinstance(self.answer, Exception):
            raise self.answer
        assert len(hashes) == HASH_BYTES * len(self.answer)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "tokens", "expected"),
    [
        (b"\1\2\3", 3 * BLOCK, {CacheHitSource.HOST: 2 * BLOCK, CacheHitSource.DISK: BLOCK}),
        (b"\4\0", 2 * BLOCK, {CacheHitSource.EXTERNAL_UNSPECIFIED: 2 * BLOCK}),
        (b"\1\1", BLOCK + 3, {CacheHitSource.HOST: BLOCK + 3}),
        (b"\3", BLOCK + 3, {CacheHitSource.DISK: BLOCK, CacheHitSource.EXTERNAL_UNSPECIFIED: 3}),
        (b"", 5, {CacheHitSource.EXTERNAL_UNSPECIFIED: 5}),
        (Unavailable("away"), BLOCK, {CacheHitSource.EXTERNAL_UNSPECIFIED: BLOCK}),
    ],
)
def test_the_counts_are_those_of_the_tokens(answer, tokens, expected):
    blocks = 1 if isinstance(answer, Exception) else len(answer)
    found = sources(Told(answer), bytes(32), [bytes(HASH_BYTES)] * blocks, BLOCK, tokens)
    assert found == expected and sum(found.values()) == tokens
