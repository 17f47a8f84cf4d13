"""Jobs with buffers that lie in no engine's memory."""

import array
import gc
from typing import Any

import pytest
from daemon import Host
from engine import NAMESPACE, wait

from kvasir._core import Core


@pytest.fixture
def core(host: Host) -> Core:
    return Core(host.unix, match_ms=5000, load_ms=30_000)


def test_buffers_of_all_kinds_and_sizes(core: Core) -> None:
    values: list[Any] = [
        b"bytes",
        bytearray(b"x" * 100_000),
        memoryview(array.array("d", [1.5, 2.5])),
        array.array("H", [7]),
    ]
    keys = [b"%d" % at for at in range(4)]
    core.save_from(1, NAMESPACE, keys, values)
    assert wait(core)[0] == (1, True, b"\1" * 4, 5 + 100_000 + 16 + 2, None)
    into: list[Any] = [bytearray(5), memoryview(bytearray(100_002))[1:-1], array.array("d", [0, 0]), bytearray(2)]
    core.load_into(2, NAMESPACE, [*keys[:3], b"other"], into)
    assert wait(core)[0] == (2, False, b"\1\1\1\0", 5 + 100_000 + 16, None)
    assert [bytes(memoryview(value).cast("B")) for value in into[:3]] == [bytes(value) for value in values[:3]]
    assert core.sizes(NAMESPACE, [*keys, b"other"]) == [5, 100_000, 16, 2, None]
    # The keys are the hashes of other calls.
    assert core.prefix([NAMESPACE], b"".join(keys), 1) == 4
    assert core.remove(NAMESPACE, [keys[0], b"other"]) == b"\1\0"
    core.save_from(3, NAMESPACE, [], [])
    assert wait(core)[0] == (3, True, b"", 0, None)


def test_numpy_arrays_are_buffers(core: Core) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(6, dtype=numpy.float16).reshape(2, 3)
    core.save_from(1, NAMESPACE, [b"n"], [value])
    assert wait(core)[0][1]
    into = numpy.zeros((3, 2), dtype=numpy.float16)
    core.load_into(2, NAMESPACE, [b"n"], [into])
    assert wait(core)[0][1] and (into.reshape(2, 3) == value).all()
    with pytest.raises(BufferError, match="contiguous"):
        core.save_from(3, NAMESPACE, [b"m"], [value.T])
    objects = numpy.array([b"1", None], dtype=object)
    for transfer in (core.save_from, core.load_into):
        with pytest.raises(BufferError, match="Python objects"):
            transfer(4, NAMESPACE, [b"n"], [objects])


def test_a_buffer_of_another_size_is_no_hit(core: Core) -> None:
    core.save_from(1, NAMESPACE, [b"k"], [b"12345"])
    assert wait(core)[0][1]
    for size in (4, 6):
        core.load_into(2, NAMESPACE, [b"k"], [bytearray(size)])
        _, ok, here, copied, error = wait(core)[0]
        assert (ok, here, copied) == (False, b"\0", 0) and error is not None and "stored with" in error


def test_buffers_that_cannot_be_used_are_refused(core: Core) -> None:
    def refused(buffers: list[Any], text: str, error: type[Exception] = BufferError) -> None:
        with pytest.raises(error, match=text):
            core.load_into(1, NAMESPACE, [b"k"], buffers)

    refused([b"read-only"], "buffer 0 is read-only")
    refused([bytearray()], "empty")
    refused(["text"], "cannot be used")
    refused([7], "cannot be used")
    refused([memoryview(bytearray(10))[::2]], "contiguous")
    refused([bytearray(1), bytearray(1)], "1 keys for 2 buffers", ValueError)
    with pytest.raises(BufferError, match="empty"):
        core.save_from(1, NAMESPACE, [b"k", b"l"], [b"1", b""])
    assert core.drain() == []


def test_a_buffer_is_kept_and_keeps_its_size_until_it_is_drained(core: Core) -> None:
    value = bytearray(b"z" * 1000)
    core.save_from(1, NAMESPACE, [b"k"], [value])
    with pytest.raises(BufferError):
        value.extend(b"more")
    gc.collect()
    assert wait(core)[0][1]
    value.extend(b"more")
    # Nobody else has it; the job does.
    core.save_from(2, NAMESPACE, [b"l"], [bytearray(b"y" * 1000)])
    gc.collect()
    assert wait(core)[0][1]
    into = bytearray(1000)
    assert core.get(NAMESPACE, b"l", into) and into == b"y" * 1000
