"""Blocks by name."""

import ctypes
import threading

import pytest
from daemon import Host

import kvasir


@pytest.fixture(params=["unix", "tcp"])
def client(host: Host, request: pytest.FixtureRequest) -> kvasir.Client:
    if request.param == "unix":
        return kvasir.Client(host.unix)
    return kvasir.Client(host.tcp, token=host.token("operator"))


def test_what_is_put_is_got(client: kvasir.Client) -> None:
    assert client.get("a") is None and not client.exists("a") and client.size("a") is None
    assert client.put("a", b"hello")
    assert not client.put("a", b"other"), "blocks never change"
    assert client.get("a") == b"hello" and client.exists("a") and client.size("a") == 5
    assert client.get(b"a") == b"hello", "a text is its UTF-8"
    into = bytearray(5)
    assert client.get("a", into=into) is True and into == b"hello"
    assert client.get("b", into=into) is False
    with pytest.raises(kvasir.Mismatch, match="stored with"):
        client.get("a", into=bytearray(4))
    assert client.remove("a") and not client.remove("a") and client.get("a") is None


def test_namespaces_do_not_meet(host: Host) -> None:
    with kvasir.Client(host.unix, namespace="one") as one, kvasir.Client(host.unix, namespace="two") as two:
        one.put("k", b"1")
        assert two.get("k") is None
        same = kvasir.Client(host.unix, namespace=kvasir.namespace_digest("one"))
        assert same.get("k") == b"1"
    with pytest.raises(kvasir.Error, match="closed"):
        one.get("k")
    with pytest.raises(ValueError, match="32 B"):
        kvasir.Client(host.unix, namespace=b"short")


def test_arrays_go_in_and_out_without_a_copy(client: kvasir.Client) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(50_000, dtype=numpy.float32)
    assert client.put("array", value)
    into = numpy.zeros((500, 100), dtype=numpy.float32)
    assert client.get("array", into=into) and (into.reshape(-1) == value).all()
    with pytest.raises(ValueError, match="contiguous"):
        client.put("other", into.T)
    into.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        client.get("array", into=into)


class Tensor:
    """What a tensor on the CPU shows, without torch."""

    class Device:
        type = "cpu"

    device = Device()

    def __init__(self, data: bytes) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.contiguous = True

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def numel(self) -> int:
        return len(self.memory) // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.contiguous


class Interface:
    """What an array shows that has no buffer."""

    def __init__(self, data: bytes) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(data) // 4, 2),
            "typestr": "<u2",
            "data": (ctypes.addressof(self.memory), False),
        }


@pytest.mark.parametrize("kind", [Tensor, Interface])
def test_memory_that_is_known_by_its_address(client: kvasir.Client, kind: type) -> None:
    assert client.put("t", kind(b"12345678"))
    into = kind(b"\0" * 8)
    assert client.get("t", into=into) and into.memory.raw == b"12345678"
    assert client.get("t") == b"12345678"


def test_what_shows_no_bytes_is_refused(client: kvasir.Client) -> None:
    for value in ("text", 7, None, [1, 2], object()):
        with pytest.raises(TypeError, match="no contiguous bytes"):
            client.put("k", value)
    strided = Tensor(b"1234")
    strided.contiguous = False
    with pytest.raises(ValueError, match="contiguous"):
        client.put("k", strided)
    with pytest.raises(BufferError, match="empty"):
        client.put("k", b"")
    assert not client.exists("k")


def test_arrays_without_a_buffer_go_by_their_address(client: kvasir.Client) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.array(["2026-11-22", "1970-01-01"], dtype="M8[s]")
    with pytest.raises(ValueError, match="buffer"):
        memoryview(value)
    into = numpy.zeros(2, dtype="M8[s]")
    assert client.put("dates", value) and client.get("dates", into=into) and (into == value).all()


def test_references_to_objects_are_no_bytes(client: kvasir.Client) -> None:
    numpy = pytest.importorskip("numpy")
    mixed = numpy.zeros(2, dtype=[("O", "i4"), ("b", [("when", "M8[s]"), ("who", "O")])])
    for value in (numpy.array([object()], dtype=object), numpy.zeros(2, dtype=[("a", "i4"), ("b", "O")]), mixed):
        with pytest.raises((BufferError, ValueError), match="Python objects"):
            client.put("objects", value)
        with pytest.raises((BufferError, ValueError), match="Python objects"):
            client.get("objects", into=value)
    assert client.put("numbers", numpy.zeros(2, dtype=[("O", "i4"), ("b", "M8[s]")]))
    assert not client.exists("objects")


def test_a_block_that_is_too_large_is_refused(client: kvasir.Client) -> None:
    with pytest.raises(kvasir.Refused):
        client.put("large", bytes(17 << 20))
    assert client.put("small", b"1"), "the connection still works"


def test_a_host_that_is_gone_is_told(host: Host) -> None:
    client = kvasir.Client(host.unix)
    client.put("k", b"1")
    host.stop()
    with pytest.raises(kvasir.Unavailable):
        client.get("k")
    host.start()
    assert client.get("k") is None
    assert client.put("k", b"2") and client.get("k") == b"2"


def test_many_threads_use_one_client(client: kvasir.Client) -> None:
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for at in range(20):
                value = bytes([n, at]) * 1000
                assert client.put(f"{n}/{at}", value)
                assert client.get(f"{n}/{at}") == value
                assert client.remove(f"{n}/{at}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
