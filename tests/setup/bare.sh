#!/bin/bash
# Try the set-up on a bare Debian: `tests/setup/bare.sh trixie` or `bookworm`, as root.
#
# Makes a root file system of that release with nothing in it but Python and make
# (debootstrap, minbase), enters it in namespaces of its own, and does there in a clone
# of this checkout's last commit:
#   1. as an ordinary user: `make dev` names what an administrator has to install;
#   2. likewise where that was installed, but no C compiler: `make dev` completes, `make lab`
#      serves, and `doctor` says why nothing can be saved;
#   3. as root: `make dev` installs and builds all, `make lab` serves, a kernel is saved,
#      killed and restored through the command line (smoke.py); `make lint` passes;
#   4. as an ordinary user: `make dev` says what capture needs, and `doctor` the same; then that
#      is granted, and the check of 3 passes.
# `tests/setup/bare.sh RELEASE test` does 3 alone, and then `make test`; with `bench` in its place
# 3 alone, and then `make bench` with little data: that it runs, not what it measures.
# `tests/setup/bare.sh RELEASE binder` runs `binder/postBuild` as a user in a fresh environment, with
# the packages of `binder/apt.txt`, and looks whether the sample notebook is what opens.
#
# Takes 5 to 10 minutes (`test`: 30 to 60, and gigabytes of PyTorch; `bench` likewise) and 1 GB below
# BARE_DIR (`test`, `bench`: 10), where the base is kept for the next run.
#
#   BARE_DIR    where roots are made (/var/tmp/jupyter-gpu-ckpt-bare)
#   BARE_NODE   Node.js program to copy in where the release's own is older than 20 (`node`)
#   BARE_FILES  files and folders that the root needs to reach the package registries from
#               this machine (apt, pip or npm configuration), copied to the same places
#   BARE_KEEP   set: leave the root there, to look at
# Certificate files that PIP_CERT, SSL_CERT_FILE and NODE_EXTRA_CA_CERTS name, and
# the proxy variables, are passed on.
set -euo pipefail
{ # read whole before it runs: it may be edited meanwhile
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)

release=${1:?usage: bare.sh bookworm|trixie [test|bench|binder]}
what=${2:-dev}
work=${BARE_DIR:-/var/tmp/jupyter-gpu-ckpt-bare}
base=$work/base-$release
user=tester
say() { printf '\n==== %s: %s (%d s)\n' "$release" "$*" "$SECONDS"; }
fail() { echo "bare.sh: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "must run as root: it makes namespaces and a root file system"
for tool in debootstrap git unshare pivot_root; do
  command -v "$tool" > /dev/null || fail "$tool is missing"
done

mkdir -p "$work"
if [ ! -e "$base/.complete" ]; then
  say "making the base"
  rm -rf --one-file-system "$base"
  debootstrap --variant=minbase --include=python3,make "$release" "$base" > "$work/debootstrap-$release.log" \
    || fail "debootstrap failed: see $work/debootstrap-$release.log"
  touch "$base/.complete"
fi

root=$(mktemp -d "$work/root-$release-XXXX")
clean_up() { [ -n "${BARE_KEEP:-}" ] && echo "left: $root" || rm -rf --one-file-system "$root"; }
trap clean_up EXIT
chmod 755 "$root"
cp -a "$base/." "$root"
for path in ${BARE_FILES:-}; do
  mkdir -p "$root$(dirname "$path")"
  cp -aL "$path" "$root$(dirname "$path")"
done
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
if [ "$release" = bookworm ]; then # its own Node.js is 18
  install -m 755 "$(readlink -f "$(command -v "${BARE_NODE:-node}")")" "$root/usr/local/bin/node"
fi
chroot "$root" useradd --create-home --shell /bin/bash "$user"

variables=(HOME=/root LANG=C.UTF-8 TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
for name in PIP_CERT SSL_CERT_FILE NODE_EXTRA_CA_CERTS; do
  [ -n "${!name:-}" ] || continue
  install -D -m 644 "${!name}" "$root/etc/registry-certificates/$name"
  variables+=("$name=/etc/registry-certificates/$name")
done
for name in http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_DEFAULT_TIMEOUT; do
  [ -z "${!name:-}" ] || variables+=("$name=${!name}")
done

for home in /root "/home/$user"; do
  git clone --quiet --no-hardlinks "$repository" "$root$home/checkout"
  git -C "$root$home/checkout" remote remove origin
done
chroot "$root" chown -R "$user:" "/home/$user"
install -m 755 "$here/smoke.py" "$root/usr/local/bin/smoke.py"

# A root of its own, not chroot: CRIU looks at the mounts.
cat > "$root/.enter" << 'ENTER'
set -eu
cd "$1"
shift
mount --bind . .
cd "$PWD"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
for folder in dev/shm tmp run; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
chmod 755 run
mkdir -p .outside
pivot_root . .outside
umount -l .outside
exec "$@"
ENTER
inside() { # COMMAND...: run in the root
  unshare --mount --pid --fork --kill-child --uts --ipc --propagation private \
    bash "$root/.enter" "$root" env -i "${variables[@]}" "$@"
}
as_root() { inside bash -euc "cd /root/checkout; $1"; }
as_user() { # also without rights that this machine's root has lent to its children
  inside setpriv --reuid "$user" --regid "$user" --init-groups --inh-caps=-all \
    env HOME="/home/$user" USER="$user" bash -euc "cd; cd checkout; $1"
}
expect() { # LOG TEXT: the log holds the text
  grep -qF -- "$2" "$1" || { cat "$1" >&2; fail "the output lacks: $2"; }
}
log=$work/last-$release.log

bare_user() {
  say "an ordinary user on the bare system"
  if as_user 'make dev' > "$log" 2>&1; then
    cat "$log" >&2
    fail "make dev succeeded without a Python that makes environments"
  fi
  expect "$log" "On Debian an administrator runs:  apt-get install"
  grep -A 1 '^Missing' "$log"
  say "an ordinary user without a compiler"
  local packages=(ca-certificates python3-venv)
  [ "$release" = bookworm ] || packages+=(nodejs)
  as_root "apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends ${packages[*]} > /dev/null"
  as_user 'make dev' 2>&1 | tee "$log"
  expect "$log" "without a C compiler"
  as_user '.venv/bin/python -I /usr/local/bin/smoke.py --capture no'
}

binder() {
  say "binder/postBuild as an ordinary user"
  local packages=(ca-certificates python3-venv)
  [ "$release" = bookworm ] || packages+=(nodejs)
  as_root "apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends ${packages[*]} \$(cat binder/apt.txt) > /dev/null"
  as_user 'python3 -m venv ../environment; PATH=~/environment/bin:$PATH binder/postBuild' 2>&1 | tee "$log"
  expect "$log" "jupyter_gpu_ckpt"
  say "the server in it"
  as_user 'PATH=~/environment/bin:$PATH
    jupyter lab --no-browser --port=8888 --IdentityProvider.token=token > ../lab.log 2>&1 &
    lab=$!
    trap "kill $lab" EXIT
    until python binder_page.py 2> /dev/null; do kill -0 $lab || { cat ../lab.log; exit 1; }; sleep 1; done
    jupyter gpu-ckpt doctor || true' 2>&1 | tee "$log"
  expect "$log" "/lab/tree/binder/sample.ipynb"
  expect "$log" "Kernels cannot be saved on this node."
}
if [ "$what" = binder ]; then
  cat > "$root/home/$user/checkout/binder_page.py" << 'PAGE'
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8888/?token=token").url)
except urllib.error.URLError as error:
    sys.exit(str(error))
PAGE
  binder
  say "done"
  exit 0
fi

[ "$what" = test ] || [ "$what" = bench ] || bare_user

say "make dev as root"
as_root 'make dev' 2>&1 | tee "$log"
expect "$log" "Kernels can be captured here"
say "make dev again"
as_root 'make dev'
say "make lab, save and restore as root"
as_root '.venv/bin/python -I /usr/local/bin/smoke.py --capture yes'
say "make lint as root"
as_root 'make lint'

if [ "$what" = test ]; then
  say "make test as root"
  as_root 'make test'
  say "done"
  exit 0
fi
if [ "$what" = bench ]; then
  say "make bench as root"
  as_root 'make bench BENCH="--sizes 0.1 --rounds 1 --store-size 0.25 --recovery-size 0.1 --sets 1"' \
    2>&1 | tee "$log"
  expect "$log" "| what | ours | compared with |"
  say "done"
  exit 0
fi

say "make dev as an ordinary user, with a compiler"
as_user 'make dev' 2>&1 | tee "$log"
expect "$log" "kernels cannot be captured here yet"
expect "$log" "sudo setcap"
say "make lab as an ordinary user, without rights"
as_user '.venv/bin/python -I /usr/local/bin/smoke.py --capture no'

say "what the set-up told an administrator to do"
grep -o '^  sudo .*' "$log" | sed 's/^  sudo //; s/ (package.*//' > "$root/.grant"
cat "$root/.grant"
as_root 'command -v setcap > /dev/null \
  || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libcap2-bin > /dev/null
  bash -eux /.grant'
as_user 'make dev' 2>&1 | tee "$log"
expect "$log" "Kernels can be captured here"
say "make lab, save and restore as an ordinary user"
as_user '.venv/bin/python -I /usr/local/bin/smoke.py --capture yes'
say "done"
exit 0
}
