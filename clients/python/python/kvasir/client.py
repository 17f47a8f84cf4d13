"""Blocks by name, for people and scripts."""

from __future__ import annotations

import ctypes
import hashlib
from types import TracebackType
from typing import Any, Self

from kvasir._core import Core, Error, Mismatch

__all__ = ["Client", "namespace_digest"]


def namespace_digest(name: str) -> bytes:
    """The namespace that a ``Client`` of this name uses: SHA-256 over a prefix and the name."""
    return hashlib.sha256(b"kvasir client namespace\0" + name.encode()).digest()


class Client:
    """A host's blocks, by name. Any thread may call anything; calls wait, and give the GIL away while they do.

    ``host`` is ``unix:/path`` (same machine, in place) or ``tcp://host:port`` (with a ``token``). Blocks of different
    ``namespace`` never meet. ``timeout_ms`` is how long a call may take.

    What a call stores is bytes: of ``bytes``, ``bytearray``, ``memoryview``, ``array``, of arrays with
    ``__array_interface__`` and of CPU tensors with ``data_ptr``, provided that they are contiguous. Nothing is copied on the
    way to the host, and on the way back only by ``get`` without ``into``.

    Raises ``Unavailable`` if the host cannot be asked now, and ``Refused`` if it does not want to; both are ``kvasir.Error``.
    """

    def __init__(
        self,
        host: str,
        *,
        namespace: str | bytes = "default",
        token: str = "",
        tenant: int = 0,
        timeout_ms: int = 10_000,
        verify: bool = True,
    ) -> None:
        self._namespace = namespace if isinstance(namespace, bytes) else namespace_digest(namespace)
        if len(self._namespace) != 32:
            raise ValueError("a namespace of bytes is a digest of 32 B; give a str to have one made of it")
        self._core = Core(
            host,
            token=token,
            tenant=tenant,
            match_ms=timeout_ms,
            load_ms=timeout_ms,
            verify=verify,
        )

    def put(self, key: str | bytes, value: object) -> bool:
        """Stores ``value``; blocks never change, so False if there is one of this key already."""
        return self._core.put(self._namespace, _key(key), _bytes_of(value))

    def get(self, key: str | bytes, into: object = None) -> Any:
        """The block as ``bytes``, or None; with ``into``, a writable buffer of the block's size, whether it is filled now.

        Raises ``Mismatch`` if the block has another size than ``into``, or was not stored by a Kvasir client under this name.
        What ``into`` holds is undefined unless the answer is True.
        """
        if into is not None:
            return self._core.get(self._namespace, _key(key), _bytes_of(into))
        for _ in range(3):
            (size,) = self._core.sizes(self._namespace, [_key(key)])
            if size is None:
                return None
            if size == 0:
                raise Mismatch(f"block {key!r} was stored by something else: it has no payload and label")
            value = bytearray(size)
            try:
                return bytes(value) if self._core.get(self._namespace, _key(key), value) else None
            except Mismatch:
                # Another block may have taken its place in between; only if it has another size.
                if self._core.sizes(self._namespace, [_key(key)]) == [size]:
                    raise
        raise Error(f"block {key!r} is replaced all the time; get it again")

    def exists(self, key: str | bytes) -> bool:
        """Whether the block is there now. It may be evicted before it is read."""
        (size,) = self._core.sizes(self._namespace, [_key(key)])
        return size is not None

    def remove(self, key: str | bytes) -> bool:
        """Removes the block, on all hosts. Returns whether it was there. Over TCP that takes a token of role operator."""
        return self._core.remove(self._namespace, [_key(key)]) == b"\1"

    def size(self, key: str | bytes) -> int | None:
        """Bytes of the block, or None."""
        (size,) = self._core.sizes(self._namespace, [_key(key)])
        return size

    def boot(self) -> int:
        """A number of the host's run; 0 before the first call."""
        return self._core.boot()

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        return self._core.counters()

    def close(self) -> None:
        """Ends the connection. Calls after that raise ``Error``."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _bytes_of(value: Any) -> Any:
    """Something with a buffer of the bytes of ``value``, which keeps ``value`` alive."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        pass  # No buffer, or not with such elements: numpy refuses dates and bfloat16 with a ValueError.
    else:
        if view.c_contiguous:
            return view
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _of_array(value, interface)
    if hasattr(value, "data_ptr"):
        return _of_tensor(value)
    raise TypeError(f"{type(value).__name__} shows no contiguous bytes; give bytes, an array or a CPU tensor")


def _foreign(owner: object, address: int, size: int, read_only: bool) -> memoryview:
    """Bytes at an address. The view keeps ``owner``, and with it the memory."""
    if size == 0:
        raise ValueError("there is nothing in it; a block has at least one byte")
    array = (ctypes.c_ubyte * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    view = memoryview(array).cast("B")
    return view.toreadonly() if read_only else view


def _of_array(value: Any, interface: dict[str, Any]) -> Any:
    if _has_objects(interface["typestr"], interface.get("descr")):
        raise ValueError("the array holds Python objects, which are no bytes; pickle them, or give numbers")
    if interface.get("strides") is not None:
        raise ValueError("the array is not contiguous; make it so, for instance with numpy.ascontiguousarray")
    # Such as <f4, or <M8[ns], which says the unit too.
    kind, size = interface["typestr"][1], int(interface["typestr"][2:].partition("[")[0])
    if kind == "U":
        size *= 4  # It counts characters.
    for length in interface["shape"]:
        size *= length
    address, read_only = interface["data"]
    return _foreign(value, address, size, read_only)


def _has_objects(typestr: str, descr: object) -> bool:
    """Whether an element is a reference to a Python object, or has one in some field."""
    if typestr[1] == "V" and isinstance(descr, list):
        return any(_has_objects("|V" if isinstance(field[1], list) else field[1], field[1]) for field in descr)
    return typestr[1] == "O"


def _of_tensor(value: Any) -> Any:
    if value.device.type != "cpu":
        raise ValueError(f"the tensor is on {value.device}; copy it to the CPU first")
    if not value.is_contiguous():
        raise ValueError("the tensor is not contiguous; use tensor.contiguous()")
    return _foreign(value, value.data_ptr(), value.numel() * value.element_size(), False)
