"""SGLang's cache controller, with its own threads and pools, over the storage backend and a real host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed: see clients/python/tests/sglang/install.sh")

import torch
from sglang_parts import PAGE, Engine, fill, mha, mla, page, until

PAGES = 8
TOKENS = list(range(1000, 1000 + PAGES * PAGE))

LAYOUTS = [
    pytest.param(make, layout, id=f"{make.__name__}-{layout}")
    for make, layouts in (
        (mha, ("page_first", "page_first_direct", "page_head", "layer_first")),
        (mla, ("page_first", "page_first_direct", "layer_first")),
    )
    for layout in layouts
]


def there_and_back(engine: Engine, tokens: list[int] = TOKENS) -> None:
    """Saves the first pages of the pool and loads them to other pages, which must then be equal."""
    fill(engine.pool)
    source = engine.pool.alloc(len(tokens))
    assert engine.save(tokens, source) == len(tokens)
    operation = engine.ask(tokens)
    assert operation.storage_hit_count == len(tokens)
    target = engine.pool.alloc(len(tokens))
    assert engine.load(operation, target) == len(tokens)
    for at in range(0, len(tokens), PAGE):
        assert torch.equal(page(engine.pool, int(source[at])), page(engine.pool, int(target[at])))


@pytest.mark.parametrize(("make", "layout"), LAYOUTS)
def test_pages_come_back_as_they_were(
    make: Callable[..., Any], layout: str, start_engine: Callable[..., Engine], extra: dict[str, Any]
) -> None:
    there_and_back(start_engine(make(layout), extra))


def test_only_the_pages_that_were_named_change(start_engine: Callable[..., Engine], extra: dict[str, Any]) -> None:
    engine = start_engine(mha(), extra)
    fill(engine.pool)
    source = engine.pool.alloc(len(TOKENS))
    engine.save(TOKENS, source)
    target = engine.pool.alloc(len(TOKENS))
    before = engine.pool.kv_buffer.clone()
    engine.load(engine.ask(TOKENS), target)
    after = engine.pool.kv_buffer.clone()
    after[:, target] = before[:, target]
    assert torch.equal(before, after)


def test_another_engine_hits_what_one_saved(start_engine: Callable[..., Engine], extra: dict[str, Any]) -> None:
    one, other = start_engine(mha(), extra), start_engine(mha(), extra)
    fill(one.pool)
    source = one.pool.alloc(len(TOKENS))
    one.save(TOKENS, source)
    target = other.pool.alloc(len(TOKENS))
    assert other.load(other.ask(TOKENS), target) == len(TOKENS)
    assert torch.equal(page(one.pool, int(source[0])), page(other.pool, int(target[0])))


def test_more_pages_than_one_batch_of_sglang(start_engine: Callable[..., Engine], extra: dict[str, Any]) -> None:
    there_and_back(start_engine(mha(tokens=8192), extra), list(range(300 * PAGE)))


def test_a_longer_prompt_hits_its_known_beginning(start_engine: Callable[..., Engine], extra: dict[str, Any]) -> None:
    engine = start_engine(mha(), extra)
    engine.save(TOKENS, engine.pool.alloc(len(TOKENS)))
    assert engine.ask([*TOKENS, *range(5 * PAGE)]).storage_hit_count == len(TOKENS)
    assert engine.ask([1, *TOKENS]).storage_hit_count == 0


def test_a_dead_host_means_no_hits_and_one_that_returns_is_used_again(
    host: Any, start_engine: Callable[..., Engine], extra: dict[str, Any]
) -> None:
    engine = start_engine(mha(), extra)
    source = engine.pool.alloc(len(TOKENS))
    assert engine.save(TOKENS, source) == len(TOKENS)
    found = engine.ask(TOKENS)
    host.kill()
    # A load may still end well: pages of a dead host stay mapped, and are compared. It must end.
    assert engine.load(found, engine.pool.alloc(len(TOKENS))) in range(len(TOKENS) + 1)
    assert engine.save(list(range(PAGE)), source[:PAGE]) == 0
    host.start()
    # The client tries the host again when its pause is over, a second at most.
    until(lambda: engine.save(TOKENS, source) == len(TOKENS))
    assert engine.ask(TOKENS).storage_hit_count == len(TOKENS)


def test_a_silent_host_does_not_stop_sglangs_threads(host: Any, start_engine: Callable[..., Engine], extra: dict[str, Any]) -> None:
    engine = start_engine(mha(), {**extra, "match_ms": 300, "load_ms": 300, "save_ms": 300})
    source = engine.pool.alloc(len(TOKENS))
    engine.save(TOKENS, source)
    found = engine.ask(TOKENS)
    host.hang()
    assert engine.ask(list(range(PAGE))).storage_hit_count == 0
    assert engine.save(list(range(PAGE)), source[:PAGE]) == 0
    assert engine.load(found, engine.pool.alloc(len(TOKENS))) in range(len(TOKENS) + 1)


def test_sglangs_own_random_failures(
    monkeypatch: pytest.MonkeyPatch, start_engine: Callable[..., Engine], extra: dict[str, Any]
) -> None:
    """Every operation is answered, and what is said to be loaded is right, however many calls fail between."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    engine = start_engine(mha(tokens=2048), extra)
    assert type(engine.storage).__name__ == "HiCacheStorageFailureInjector"
    fill(engine.pool)
    source = engine.pool.alloc(len(TOKENS))
    target = engine.pool.alloc(len(TOKENS))
    loads = 0
    for round_ in range(60):
        tokens = [round_, *TOKENS[1:]]
        if engine.save(tokens, source) < len(tokens):
            continue
        engine.pool.kv_buffer[:, target] = 0
        found = engine.ask(tokens)
        loaded = engine.load(found, target)
        assert loaded <= found.storage_hit_count
        loads += loaded
        for at in range(0, loaded, PAGE):
            assert torch.equal(page(engine.pool, int(source[at])), page(engine.pool, int(target[at])))
    assert loads > 0
