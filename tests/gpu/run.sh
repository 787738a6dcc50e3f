#!/bin/bash
# Checks saves and restores on a machine with an NVIDIA GPU, without a network, in 6 minutes at
# most, and prints a table (docs/performance.md, "On a real GPU"). Run it as root from a checkout in which pack.sh was
# run before. The rows are also written to $OUT/gpu-check.json, where OUT is a folder.
#
#   tests/gpu/run.sh [--sizes 1,10,40] [--seconds 300]
#
# GPU_CHECK_PYTHON names the Python; else one with PyTorch is looked for. GPU_CHECK_WORK=driver does without PyTorch.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
packed=$PWD/build/gpu-check
began=$SECONDS

pythons=(${GPU_CHECK_PYTHON:+"$GPU_CHECK_PYTHON"})
if [ ${#pythons[@]} = 0 ]; then
  pythons=(python3 /opt/conda/bin/python /opt/venv/bin/python /venv/bin/python /usr/local/bin/python3 /usr/bin/python3 \
    /opt/*/bin/python3 /root/*/bin/python3)
fi
python=
for one in "${pythons[@]}"; do
  one=$(command -v "$one") || continue
  "$one" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
  python=${python:-$one}
  if [ ${#pythons[@]} = 1 ] || "$one" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    python=$one
    break
  fi
done
[ -n "$python" ] || { echo "There is no Python 3.10 or newer." >&2; exit 2; }

# kernel-capture takes no CRIU that others than root can replace.
criu=/opt/jupyter-gpu-ckpt/criu
if [ ! -e $criu/criu ] && [ -e "$packed/criu.tar.gz" ]; then
  mkdir -p $criu && tar -xzf "$packed/criu.tar.gz" -C $criu --no-same-owner || exit 2
fi
if [ -z "${KERNEL_CAPTURE:-}" ] && [ -x "$packed/kernel-capture" ]; then
  # Beside the package, where the server looks for it, too.
  mkdir -p jupyter_gpu_ckpt/bin
  [ -x jupyter_gpu_ckpt/bin/kernel-capture ] || cp "$packed/kernel-capture" jupyter_gpu_ckpt/bin/
fi

# The server and what drives it, beside the PyTorch that is there.
needed='import jupyter_server, ipykernel, msgspec, requests, websocket, psutil
from importlib.metadata import distribution
distribution("jupyter-gpu-ckpt")'
if ! "$python" -c "$needed" 2>/dev/null && [ -d "$packed/wheels" ]; then
  own=$(mktemp -d /tmp/gpu-check-venv.XXXXXX)
  trap 'rm -rf "$own"' EXIT
  if timeout 90 "$python" -m venv --system-site-packages "$own" &&
    timeout 90 "$own/bin/python" -m pip install -q --no-index --find-links "$packed/wheels" -r "$packed/wheels.txt" &&
    timeout 30 "$own/bin/python" -m pip install -q --no-index --no-deps "$packed"/wheels/jupyter_gpu_ckpt-*.whl; then
    python=$own/bin/python
  else
    echo "The packages in $packed/wheels do not fit $("$python" -V): rows that need Jupyter are left out." >&2
  fi
fi

json=${OUT:+--json "$OUT/gpu-check.json"}
left=$((350 - (SECONDS - began)))
# shellcheck disable=SC2086 # two words or none
timeout -k 5 $left "$python" -m tests.gpu.check --seconds $((left - 20)) $json "$@"
