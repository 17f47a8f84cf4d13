"""Makes gather.ptx from gather.cu: python make_ptx.py LIBNVRTC

LIBNVRTC is the compiler's library of CUDA 11.7 (from PyPI: nvidia-cuda-nvrtc-cu11 11.7.99), so that drivers from 515 on take the
result. The first line names the source's checksum, which a unit test compares.
"""

import ctypes
import hashlib
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
# Turing: the oldest that drivers of today know.
OPTIONS = [b"--gpu-architecture=compute_75", b"--std=c++17"]


def main() -> None:
    nvrtc = ctypes.CDLL(sys.argv[1])
    source = (HERE / "gather.cu").read_bytes()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def do(function: str, *arguments: object) -> None:
        error = nvrtc[function](*arguments)
        if error:
            sys.exit(f"{function}: error {error}")

    do("nvrtcCreateProgram", ctypes.byref(program), source, b"gather.cu", 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options):
        do("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        do("nvrtcGetProgramLog", program, log)
        sys.exit(log.value.decode())
    do("nvrtcGetPTXSize", program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    do("nvrtcGetPTX", program, ptx)
    head = f"// gather.cu {hashlib.sha256(source).hexdigest()}\n"
    (HERE / "gather.ptx").write_text(head + ptx.value.decode())


main()
