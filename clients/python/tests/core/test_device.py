"""Blocks in a GPU's memory, against a real host: on a GPU where there is one, else on the software device (`tests/cuda`).

The driver is found by name when it is first needed, so each test is a process of its own with that one in its path.
"""

import ctypes
import os
import pathlib
import struct
import subprocess
import sys

import pytest
from daemon import ROOT, Host
from engine import LAYERS, RUN, Memory, load, pattern, save

from kvasir._core import Core, Error

NAMESPACE = bytes(range(32))
BLOCKS = 8
BYTES = LAYERS * BLOCKS * RUN


HAS_GPU = pathlib.Path("/dev/nvidiactl").exists()


def driver() -> dict[str, str]:
    """Where there is no GPU: the folder in which the software device has the driver's name."""
    if HAS_GPU:
        return {}
    folder = pathlib.Path(os.environ.get("KVASIR_SOFTWARE_CUDA", ROOT / "target/software-cuda/lib"))
    if not (folder / "libcuda.so.1").exists():
        pytest.skip("no software device: cargo xtask test --gpu builds it")
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_blocks_go_from_gpu_to_host_and_back(host: Host, door: str) -> None:
    where = [host.unix, ""] if door == "unix" else [host.tcp, host.token()]
    env = {**os.environ, **driver()}
    child = subprocess.run([sys.executable, __file__, *where], env=env, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, "all came back\n"), child.stdout + child.stderr


@pytest.mark.skipif(HAS_GPU, reason="there is a driver")
def test_without_a_driver_a_plan_of_a_gpu_is_refused(host: Host) -> None:
    code = f"from kvasir._core import Core; Core({host.unix!r}).plan(bytes(32), bytes(24), 1, device=0)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode != 0 and "kvasir.Error: no CUDA device" in child.stderr, child.stderr


class Gpu:
    """An engine's view of a GPU: the driver's functions, memory, a stream in which it computes."""

    def __init__(self, ordinal: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.do("cuCtxSetCurrent", context)
        self.do("cuStreamCreate", ctypes.byref(stream), 0)
        self.stream = stream.value or 0

    def do(self, function: str, *arguments: object) -> None:
        error = self.driver[function](*arguments)
        assert error == 0, f"{function}: {error}"

    def memory(self, content: bytes) -> int:
        address = ctypes.c_uint64()
        self.do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(content)))
        self.do("cuMemcpyHtoD_v2", address, content, ctypes.c_size_t(len(content)))
        self.do("cuCtxSynchronize")
        return address.value

    def compute(self, target: int, content: bytes) -> None:
        """Begins to write to ``target``, many times, and ``content`` in the end."""
        stale, fresh = self.memory(bytes(len(content))), self.memory(content)
        for source in [*[stale] * 400, fresh]:
            addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
            self.do("cuMemcpyAsync", *addresses, ctypes.c_size_t(len(content)), ctypes.c_void_p(self.stream))

    def read(self, address: int, length: int) -> bytes:
        content = ctypes.create_string_buffer(length)
        self.do("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(length))
        return content.raw


def runs(base: int) -> bytes:
    return b"".join(struct.pack("<QQQ", base + layer * BLOCKS * RUN, RUN, RUN) for layer in range(LAYERS))


def computed(first: int) -> bytes:
    """A cache in which block ``n`` is the one called ``first + n``."""
    return b"".join(pattern(first + n, layer) for layer in range(LAYERS) for n in range(BLOCKS))


def engine(host: str, token: str) -> None:
    # The driver's first device; by its address it is the last.
    gpu = Gpu(0)
    cache = gpu.memory(b"\xee" * BYTES)
    core = Core(host, token=token, load_ms=60_000, save_ms=60_000)
    plan = core.plan(NAMESPACE, runs(cache), BLOCKS, gpu, device=0)
    for device, base in [(1, cache), (0, id(gpu))]:
        try:
            core.plan(NAMESPACE, runs(base), BLOCKS, device=device)
        except Error as error:
            refusals = "memory that the driver knows as this GPU's", "no CUDA device"
            assert any(refusal in str(error) for refusal in refusals), error
        else:
            raise AssertionError(f"{base:#x} is not device {device}'s")

    # The engine still computes when it gives the save.
    gpu.compute(cache, computed(0))
    ended = save(core, plan, range(BLOCKS), range(BLOCKS), gpu.stream)
    assert ended[1:] == (True, b"\1" * BLOCKS, BYTES, None), ended
    memory = Memory(BLOCKS)
    on_host = memory.plan(core, NAMESPACE)
    assert load(core, on_host, range(BLOCKS), reversed(range(BLOCKS)))[1]
    assert all(memory.has(BLOCKS - 1 - n, n) for n in range(BLOCKS))

    # And still writes to blocks that are to be filled.
    for n in range(BLOCKS):
        memory.fill(n, 50 + n)
    assert save(core, on_host, range(50, 50 + BLOCKS), range(BLOCKS))[1]
    gpu.compute(cache, bytes(BYTES))
    ended = load(core, plan, range(50, 50 + BLOCKS), range(BLOCKS), gpu.stream)
    assert ended[1:] == (True, b"\1" * BLOCKS, BYTES, None), ended
    assert gpu.read(cache, BYTES) == computed(50)
    assert core.unregistered() is None
    core.unplan(plan)
    core.close()
    print("all came back")


if __name__ == "__main__":
    engine(*sys.argv[1:])
