#!/bin/bash
# Collects in build/gpu-check what tests/gpu/run.sh needs on a machine without a network: CRIU with
# its libraries, kernel-capture, and wheels of what the server needs. Below 64 MiB in all.
#
#   tests/gpu/pack.sh [PYTHON VERSION...]       3.11 3.12 3.13 where none is named
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
packed=build/gpu-check
criu=/opt/jupyter-gpu-ckpt/criu
[ $# -gt 0 ] || set -- 3.11 3.12 3.13
[ -x jupyter_gpu_ckpt/bin/kernel-capture ] && [ -x $criu/criu ] || { echo "First: make dev" >&2; exit 1; }

rm -rf $packed
mkdir -p $packed/wheels
tar -czf $packed/criu.tar.gz -C $criu --owner=root --group=root --exclude=share/doc .
cp jupyter_gpu_ckpt/bin/kernel-capture $packed/
# The front end is not needed, nor what it is made of.
"$python" - > $packed/wheels.txt <<'END'
import sys
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
print(*(line for line in needed if not line.startswith("jupyterlab")), sep="\n")
print("ipykernel", "requests", "websocket-client", sep="\n")
END
for version; do
  "$python" -m pip download -q --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d $packed/wheels -r $packed/wheels.txt
done
# Not every machine has one that works.
"$python" -m pip download -q --no-deps --only-binary=:all: -d $packed/wheels pip
"$python" -m hatchling build -t wheel -d $packed/wheels > /dev/null
size=$(du -sm $packed | cut -f1)
echo "$packed: $size MiB"
[ "$size" -lt 64 ] || { echo "Too large: name fewer versions of Python." >&2; exit 1; }
