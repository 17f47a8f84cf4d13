#!/bin/sh
# Installs SGLang's Python half into an environment: sh install.sh ENVIRONMENT/bin/python. Some 5 GB, most of it torch.
#
# No GPU and no kernels: its cache controller and its host pools need neither. Its hashes are compiled when they are first
# used, with ninja, g++ and OpenSSL's headers (libssl-dev). The wheel's own list of requirements is for CUDA machines.
set -eu
python=$1
"$python" -m pip install --quiet --disable-pip-version-check uv
install() { "$python" -m uv pip install --quiet --python "$python" "$@"; }
install torch==2.13.0 torchvision==0.28.0
install --no-deps sglang==0.5.23
install 'numpy<2.3' numba==0.65.1 msgspec aiohttp fastapi httpx 'prometheus_client<=0.24.1' psutil pyyaml pyzmq safetensors \
    uvicorn requests orjson ipython xxhash pydantic packaging tqdm pybase64 setproctitle uvloop pillow transformers==5.19.0 \
    torchao einops interegular compressed-tensors==0.18.0 dill apache-tvm-ffi==0.1.11 sentencepiece gguf ninja pytest
