"""Namespaces: one text for one meaning, and every difference named."""

import enum
import hashlib

import pytest

from kvasir import namespace

BASE = {
    "schema": 1,
    "engine": "vllm",
    "model": {"id": "org/model@v1"},
    "kv_dtype": "bfloat16",
    "pages": [{"layer": "model.layers.0", "bytes": 4096}, {"layer": "model.layers.1", "bytes": 4096}],
    "rank": {"tp": 0, "tp_size": 2},
}


def test_digest_is_sha256_of_canonical_json():
    small = {"schema": 1, "model": "m\u00e9", "engine": "x", "n": None, "t": True, "l": [1, "a"]}
    text = b'{"engine":"x","l":[1,"a"],"model":"m\\u00e9","n":null,"schema":1,"t":true}'
    assert namespace.canonical(small) == text
    assert namespace.digest(small) == hashlib.sha256(text).digest()


def test_order_of_keys_does_not_matter_and_order_of_layers_does():
    turned = dict(reversed(list(BASE.items())))
    assert namespace.digest(turned) == namespace.digest(BASE)
    swapped = BASE | {"pages": BASE["pages"][::-1]}
    assert namespace.digest(swapped) != namespace.digest(BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "sglang"},
        {"model": {"id": "org/model@v2"}},
        {"kv_dtype": "fp8_e4m3"},
        {"pages": BASE["pages"][:1]},
        {"rank": {"tp": 1, "tp_size": 2}},
        {"rank": {"tp": 0, "tp_size": 4}},
        {"epoch": "00"},
    ],
)
def test_each_field_counts(change):
    other = BASE | change
    assert namespace.digest(other) != namespace.digest(BASE)
    assert namespace.explain(BASE, other), "a difference that changes the digest has a line"


def test_values_of_two_types_never_meet():
    seen = {namespace.digest(BASE | {"x": value}) for value in (0, "0", False, None, [], {}, [0])}
    assert len(seen) == 7
    assert namespace.explain(BASE | {"x": 1}, BASE | {"x": True}) == ["x: 1 against true"]


@pytest.mark.parametrize("name", namespace.REQUIRED)
def test_a_missing_field_is_refused_by_name(name):
    for broken in ({k: v for k, v in BASE.items() if k != name}, BASE | {name: ""}):
        with pytest.raises(ValueError, match=name):
            namespace.digest(broken)


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema 2"):
        namespace.digest(BASE | {"schema": 2})


class Kind(enum.IntEnum):
    FULL = 1


@pytest.mark.parametrize("value", [1.0, b"x", {1: 2}, {"a": [object()]}, Kind.FULL, float("nan")])
def test_values_without_one_text_are_refused(value):
    with pytest.raises(ValueError, match="odd"):
        namespace.canonical(BASE | {"odd": value})


def test_explain_names_the_field():
    other = BASE | {"rank": {"tp": 1, "tp_size": 2}, "pages": BASE["pages"][:1], "extra": 1}
    assert namespace.explain(BASE, other) == [
        "extra: only in the second (1)",
        "pages: 2 entries against 1",
        "rank.tp: 0 against 1",
    ]
    assert namespace.explain(BASE, dict(BASE)) == []
