"""What a block's key must say beside the engine's hash: whose model, which bytes, in which order.

An engine's block hash covers token ids and what the engine mixes in (adapter, salt, images). It does not cover the model,
its weights, the type and layout of the cache, or which shard of it a worker holds. All of that goes into a *namespace*: a
flat or nested dict of plain values, written as canonical JSON and hashed. Two engines share blocks when, and only when,
their digests are equal, so a field that is missing here can mean wrong KV and a field too many costs only misses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
"""Version of the meaning of the fields. A change of meaning changes this number, and with it every digest."""

REQUIRED = ("schema", "engine", "model")
"""Fields without which a digest would let different models meet."""


def canonical(fields: Mapping[str, Any]) -> bytes:
    """The one text of `fields`: sorted keys, no spaces, ASCII only.

    Values are strings, integers, booleans, None, and lists and dicts of these. Raises ValueError for anything else; a
    float is refused because its text is not the same everywhere.
    """
    checked = _plain(fields, "")
    text = json.dumps(checked, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def digest(fields: Mapping[str, Any]) -> bytes:
    """SHA-256 (32 bytes) of the canonical text of a namespace.

    Raises ValueError when a field of `REQUIRED` is missing or empty, or the schema is not the one written here.
    """
    for name in REQUIRED:
        if not fields.get(name):
            raise ValueError(f"a namespace needs the field {name!r}, and this one has {sorted(fields)}")
    if fields["schema"] != SCHEMA:
        raise ValueError(f"a namespace of schema {fields['schema']!r}; this version of kvasir writes schema {SCHEMA}")
    return hashlib.sha256(canonical(fields)).digest()


def explain(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line for each field in which two namespaces differ, so that nobody has to guess why nothing is hit.

    Empty when the namespaces are equal.
    """
    return list(_differences(_plain(a, ""), _plain(b, ""), ""))


def _plain(value: Any, path: str) -> Any:
    # bool is an int for Python, and json writes it as true: both are wanted. A subclass such as an IntEnum is not, as
    # json would write its value and str() its name.
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ValueError(f"the namespace field {path or 'itself'} has the key {key!r}; keys are strings")
        return {key: _plain(inner, _join(path, key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{path}[{at}]") for at, inner in enumerate(value)]
    raise ValueError(
        f"the namespace field {path or 'itself'} is a {type(value).__name__}; "
        "use strings, integers, booleans, None, and lists and dicts of these"
    )


def _differences(a: Any, b: Any, path: str) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            inner = _join(path, key)
            if key not in a:
                yield f"{inner}: only in the second ({_short(b[key])})"
            elif key not in b:
                yield f"{inner}: only in the first ({_short(a[key])})"
            else:
                yield from _differences(a[key], b[key], inner)
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield f"{path}: {len(a)} entries against {len(b)}"
        for at, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from _differences(left, right, f"{path}[{at}]")
    elif type(a) is not type(b) or a != b:
        yield f"{path or 'namespace'}: {_short(a)} against {_short(b)}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:97]}..."
