#!/bin/sh
# Installs LMCache into a Python environment: sh install.sh ENVIRONMENT/bin/python. Some 5 GB, most of it torch. No GPU.
#
# The wheel asks for CUDA's Python packages, which are not needed on a CPU, and names no version of torch: with 2.13.0 its
# native library loads.
set -eu
python=$1
"$python" -m pip install --quiet --disable-pip-version-check uv
install() { "$python" -m uv pip install --quiet --python "$python" "$@"; }
install torch==2.13.0
install --no-deps lmcache==0.5.6
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$python" - > "$folder/rest.txt" <<END
from importlib.metadata import requires
import re

for one in requires("lmcache"):
    if "extra" not in one and not re.match(r"(torch|cupy|cuda|cufile|nvtx|awscrt|google)", one):
        print(one)
END
install --requirement "$folder/rest.txt" nvtx pytest
