"""Objects on real servers, over a network that fails in every way."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.damage import Damaged
from jupyter_gpu_ckpt.store.objects import Missing, Objects
from tests.harness.s3 import ObjectServer, Proxy, S3Server, options
from tests.store.remote.conftest import Connect, everywhere

MIB = 1 << 20


@everywhere
def test_what_was_put_comes_back(connect: Connect) -> None:
    objects, data = connect(), os.urandom(3 * MIB + 1)
    assert objects.size("packs/a") is None
    assert objects.put("packs/a", data)
    assert objects.size("packs/a") == len(data)
    assert objects.get("packs/a") == data
    assert objects.get("packs/a", 5, 70_000) == data[5:70_005]
    objects.put("packs/b", b"")
    objects.put("other/c", b"new")
    found = objects.list("packs")
    assert {name: entry.size for name, entry in found.items()} == {
        "packs/a": len(data),
        "packs/b": 0,
    }
    assert abs(found["packs/a"].modified - time.time()) < 60
    before = objects.list("other")["other/c"].version
    objects.put("other/c", b"old")
    assert objects.list("other")["other/c"].version != before
    objects.delete("packs/a")
    objects.delete("packs/a")
    assert objects.list("packs").keys() == {"packs/b"}
    assert objects.list("nothing") == {}
    with pytest.raises(Missing):
        objects.get("packs/a")


@everywhere
def test_what_exists_is_not_made_anew(connect: Connect) -> None:
    objects = connect()
    assert objects.put("store.json", b"first", create=True)
    assert not objects.put("store.json", b"second", create=True)
    assert objects.get("store.json") == b"first"


@everywhere
def test_large_files_go_in_parts_both_ways(
    connect: Connect, system: ObjectServer, proxy: Proxy, tmp_path: Path
) -> None:
    """Parts for Google Cloud are not counted: its server for tests takes them past the proxy."""
    objects, data = connect(timeout=20), os.urandom(70 * MIB)
    (tmp_path / "a").write_bytes(data)
    assert objects.put_file("big", tmp_path / "a") == len(data)
    if system.protocol != "gs":
        parts = {"s3": ("partNumber", 9), "abfs": ("comp=block&", 18)}
        what, least = parts[system.protocol]
        assert proxy.count("PUT", what) >= least
    objects.fetch("big", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    assert proxy.count("GET", "big") >= 9


@everywhere
@pytest.mark.parametrize("kind", ["503", "cut request", "lost put", "hang"])
def test_an_upload_that_fails_is_tried_again(
    connect: Connect, system: ObjectServer, proxy: Proxy, kind: str
) -> None:
    objects, data = connect(timeout=1.0), os.urandom(MIB)
    proxy.fault(kind, *system.upload("pack"), times=1)  # type: ignore[arg-type]
    objects.put("pack", data)
    assert objects.get("pack") == data
    assert proxy.count(*system.upload("pack")) == 2


@everywhere
@pytest.mark.parametrize("kind", ["503", "cut response", "short response", "hang"])
def test_a_download_that_fails_is_tried_again(
    connect: Connect, system: ObjectServer, proxy: Proxy, tmp_path: Path, kind: str
) -> None:
    objects, data = connect(timeout=1.0), os.urandom(MIB)
    objects.put("pack", data)
    proxy.fault(kind, *system.download("pack"), times=1)  # type: ignore[arg-type]
    objects.fetch("pack", tmp_path / "pack")
    assert (tmp_path / "pack").read_bytes() == data


def test_a_system_that_is_asked_to_slow_down_is_asked_ever_less_often(
    connect: Connect, system: ObjectServer, proxy: Proxy
) -> None:
    objects = connect(timeout=20, attempts=5)  # there is time for the longest pauses
    proxy.fault("503", *system.upload("pack"), times=4)
    objects.put("pack", b"x")
    at = [r.at for r in proxy.requests if r.method == system.upload("pack")[0] and "pack" in r.path]
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert len(pauses) == 4
    # Each is twice the one before, more or less, so that clients do not come all at once.
    assert pauses[3] > 2 * pauses[0], pauses


@everywhere
def test_a_length_that_stays_wrong_is_damage(
    connect: Connect, system: ObjectServer, proxy: Proxy, tmp_path: Path
) -> None:
    objects = connect(attempts=2)
    objects.put("pack", bytes(MIB))
    proxy.fault("short response", *system.download("pack"), times=99)
    with pytest.raises(Damaged, match="instead of"):
        objects.fetch("pack", tmp_path / "pack")
    assert not list(tmp_path.iterdir())
    proxy.fault("lost put", *system.upload("pack2"), times=99)
    said = (
        "arrived" if system.protocol == "s3" else "does not work"
    )  # others expect more of an answer
    with pytest.raises(CkptError, match=said):
        objects.put("pack2", bytes(MIB))


@everywhere
def test_nobody_there_is_one_clear_error_in_time(connect: Connect, proxy: Proxy) -> None:
    objects = connect(timeout=1.0, attempts=3)
    proxy.down()
    began = time.monotonic()
    with pytest.raises(CkptError, match="does not work") as refused:
        objects.list("packs")
    assert refused.value.reason == "store_unavailable" and refused.value.hint
    proxy.up()
    proxy.fault("hang", times=99)
    with pytest.raises(CkptError, match="no answer within 1 s"):
        objects.get("packs/a")
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("system", ["s3", "azure"], indirect=True)
def test_wrong_credentials_are_not_tried_again(
    url: str, system: ObjectServer, proxy: Proxy
) -> None:
    """Google's server for tests looks at no credentials; see the next test."""
    objects = Objects(url, system.wrong_options(proxy.port))
    with pytest.raises(CkptError, match="does not work") as denied:
        objects.put("a", b"1")
    assert denied.value.hint is not None and "credentials" in denied.value.hint
    assert proxy.count("PUT") == 1
    assert "\n" not in denied.value.message
    for secret in ("wrong", "d3Jvbmc"):
        assert secret not in f"{denied.value.message} {denied.value.details}"


@pytest.mark.parametrize("system", ["gcs"], indirect=True)
@pytest.mark.parametrize("status", ["401", "403"])
def test_refusals_of_google_are_not_tried_again(
    connect: Connect, system: ObjectServer, proxy: Proxy, status: Literal["401", "403"]
) -> None:
    objects = connect(timeout=20)
    asks: dict[str, Callable[[], object]] = {
        "/upload/": lambda: objects.put("a", b"1"),
        "/o/": lambda: objects.get("a"),
        "prefix=": lambda: objects.list("packs"),
    }
    for path, ask in asks.items():
        proxy.fault(status, path=path, times=9)
        with pytest.raises(CkptError, match="does not work") as denied:
            ask()
        assert denied.value.reason == "store_unavailable" and denied.value.hint is not None
        assert "Check the credentials" in denied.value.hint
        assert "\n" not in denied.value.message
        assert proxy.count(path=path) == 1
        proxy.heal()
        proxy.requests.clear()


@everywhere
def test_a_bucket_that_is_not_there(system: ObjectServer, proxy: Proxy) -> None:
    objects = Objects(f"{system.protocol}://no-such-bucket/states", proxy.options)
    assert objects.size("a") is None
    assert objects.list("packs") == {}
    with pytest.raises(CkptError) as missing:
        objects.put("a", b"1")
    assert missing.value.hint in ("Does the bucket exist?", "Does the container exist?")
    assert "\n" not in missing.value.message
    assert proxy.count(*system.upload("a")) == 1


def test_a_token_that_is_refused_is_not_shown(proxy: Proxy) -> None:
    objects = Objects("gs://a/b", {"token": "secret/of a user"})
    with pytest.raises(CkptError, match="cannot be opened") as refused:
        objects.size("c")
    assert "of a user" not in unquote(f"{refused.value.message} {refused.value.details}")


def test_options_are_not_shown_where_an_object_cannot_be_written() -> None:
    objects = Objects("file:///proc/nowhere", {"token": "of-a-user"})
    with pytest.raises(CkptError, match="does not work") as refused:
        objects.put("of-a-user/a", b"1")
    assert "of-a-user" not in refused.value.message


@everywhere
def test_closing_ends_what_waits(connect: Connect, system: ObjectServer, proxy: Proxy) -> None:
    objects = connect(timeout=60)
    proxy.fault("hang", *system.download("/a"), times=9)
    errors: list[str] = []

    def read() -> None:
        try:
            objects.get("a")
        except CkptError as error:
            errors.append(error.reason)

    thread = threading.Thread(target=read)
    thread.start()
    while not proxy.count(*system.download("/a")):
        time.sleep(0.01)
    objects.close()
    thread.join(5)
    assert errors == ["cancelled"]
    with pytest.raises(CkptError, match="cancelled"):
        objects.size("a")


@everywhere
def test_from_many_threads_and_after_a_fork(connect: Connect) -> None:
    objects = connect(timeout=10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: objects.put(f"many/{n}", b"%d" % n), range(40)))
    assert len(objects.list("many")) == 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons': there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if objects.get("many/7") == b"7" else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.02)
    assert ended[1] == 0
    assert objects.get("many/8") == b"8"


def test_credentials_from_the_environment(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(s3_server.port)
    environment = {
        "AWS_ACCESS_KEY_ID": given["key"],
        "AWS_SECRET_ACCESS_KEY": given["secret"],
        "FSSPEC_S3_ENDPOINT_URL": given["endpoint_url"],
    }
    program = (
        "import sys; from jupyter_gpu_ckpt.store.objects import Objects\n"
        "objects = Objects(sys.argv[1]); objects.put('a', b'1'); assert objects.get('a') == b'1'"
    )
    subprocess.run(
        [sys.executable, "-c", program, url],
        env={**os.environ, **environment}, check=True, timeout=30,
    )  # fmt: skip


def test_a_package_that_is_missing_is_named() -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from jupyter_gpu_ckpt.store.objects import Objects\n"
        "from jupyter_gpu_ckpt.errors import CkptError\n"
        "try: Objects('s3://a/b').size('c')\n"
        "except CkptError as error: print(error.message, error.hint)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert "s3fs is missing" in said.stdout
    assert "pip install jupyter-gpu-ckpt[s3]" in said.stdout


def test_a_url_that_nobody_knows() -> None:
    with pytest.raises(CkptError, match="cannot be opened"):
        Objects("nosuch://a/b").size("c")


def test_folders_and_memory_too(tmp_path: Path) -> None:
    for address in (f"file://{tmp_path}/store", "memory://store-of-a-test"):
        objects = Objects(address)
        objects.put("packs/a", b"12345")
        assert objects.get("packs/a", 1, 3) == b"234"
        assert not objects.put("packs/a", b"", create=True)
        assert objects.list("packs")["packs/a"].size == 5
        objects.fetch("packs/a", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"12345"
        (tmp_path / "copy").unlink()
        objects.delete("packs/a")
        assert objects.size("packs/a") is None
