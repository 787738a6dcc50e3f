#!/bin/bash
# Checks saves and restores on a machine with an NVIDIA GPU, without a network, in 6 minutes at
# most, and prints a table: see README.md here. Run it from a checkout in which pack.sh was run
# before, as root if possible. What the machine lacks becomes a row that says so.
#
#   tests/gpu/run.sh [--sizes 1,10,40] [--only TEXT]
#
# With OUT=FOLDER the rows and all logs are also written there. GPU_CHECK_PYTHON names the Python; else one with
# PyTorch is looked for. GPU_CHECK_WORK=driver does without PyTorch.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
packed=$PWD/build/gpu-check
began=$SECONDS
say() { echo "$*" >&2; }

pythons=(${GPU_CHECK_PYTHON:+"$GPU_CHECK_PYTHON"})
if [ ${#pythons[@]} = 0 ]; then
  pythons=(python3 python /opt/conda/bin/python /opt/venv/bin/python /venv/bin/python /usr/local/bin/python3 \
    /usr/bin/python3 /opt/*/bin/python3 /root/*/bin/python3 /root/*/envs/*/bin/python /opt/conda/envs/*/bin/python)
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
[ -n "$python" ] || { say "There is no Python 3.10 or newer: GPU_CHECK_PYTHON names one elsewhere."; exit 2; }

# CRIU finds its libraries at this place only, and kernel-capture takes none that others than root can replace.
criu=/opt/jupyter-gpu-ckpt/criu
if [ ! -e $criu/criu ] && [ -e "$packed/criu.tar.gz" ]; then
  { mkdir -p $criu && tar -xzf "$packed/criu.tar.gz" -C $criu --no-same-owner; } ||
    say "CRIU cannot be put into $criu (by root, it could): rows that need it are left out."
fi
if [ -z "${KERNEL_CAPTURE:-}" ] && [ ! -x jupyter_gpu_ckpt/bin/kernel-capture ] && [ -e "$packed/kernel-capture" ]; then
  # Beside the package, where the server looks for it, too.
  if ! { mkdir -p jupyter_gpu_ckpt/bin && install -m 755 "$packed/kernel-capture" jupyter_gpu_ckpt/bin/; }; then
    export KERNEL_CAPTURE=$packed/kernel-capture
  fi
fi

# The server and what drives it, in an environment of its own that sees the PyTorch that is there.
needed='import jupyter_server, ipykernel, msgspec, requests, websocket, psutil
from importlib.metadata import distribution
distribution("jupyter-gpu-ckpt")'
# Neither ensurepip nor pip is needed there; and a Python may itself be that of an environment, whose packages
# --system-site-packages would not show.
see='import site, sys, sysconfig
paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
if site.ENABLE_USER_SITE:
    paths.add(site.getusersitepackages())
print(*(f"import site; site.addsitedir({path!r})" for path in sorted(paths)), sep="\n")'
prepare() {
  local pip
  pip=$(echo "$packed"/wheels/pip-*.whl)
  timeout 60 "$python" -m venv --without-pip "$own" || return
  "$python" -c "$see" > "$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-there.pth" || return
  PYTHONPATH=$pip timeout 90 "$own/bin/python" -m pip install -q --no-index --ignore-installed --find-links "$packed/wheels" \
    -r "$packed/wheels.txt" || return
  PYTHONPATH=$pip timeout 30 "$own/bin/python" -m pip install -q --no-index --no-deps "$packed"/wheels/jupyter_gpu_ckpt-*.whl
}
if ! "$python" -c "$needed" 2>/dev/null && [ -d "$packed/wheels" ]; then
  own=$(mktemp -d /tmp/gpu-check-venv.XXXXXX)
  trap 'rm -rf "$own"' EXIT
  if prepare && "$own/bin/python" -c "$needed"; then
    python=$own/bin/python
  else
    say "The packages in $packed/wheels do not fit $("$python" -V): rows that need Jupyter are left out."
  fi
fi

json=()
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT" && json=(--json "$OUT/gpu-check.json")
fi
left=$((350 - (SECONDS - began)))
timeout -k 5 $left "$python" -m tests.gpu.check --seconds $((left - 20)) "${json[@]}" "$@"
