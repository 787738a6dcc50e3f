"""R's session folder is found, and comes back with what is in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_gpu_ckpt.capture import files, r_session
from jupyter_gpu_ckpt.capture.images_proto import Image, write_image

_TALKS = """
cat(tempdir(), "\\n"); flush(stdout())
eval(parse(text = readLines(file("stdin"), 1)))
"""


@contextmanager
def r(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """R with its folder for temporary files there, and its session folder in that."""
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary), "HOME": str(temporary)}
    with subprocess.Popen(
        ["R", "--no-echo", "--vanilla", "-e", _TALKS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_comes_back_whole_for_an_r_that_has_nothing_open_in_it(tmp_path: Path) -> None:
    images_dir, local = tmp_path / "images", tmp_path / "local"
    images_dir.mkdir()
    write_image(images_dir / "files.img", Image(bytes(8), []))
    local.mkdir()
    with r(local) as (process, folder):
        assert r_session.folders(process.pid) == [str(folder)]
        (folder / "inner").mkdir()
        (folder / "inner" / "data").write_text("data")
        (folder / "empty").mkdir(mode=0o750)
        (folder / "link").symlink_to("/etc/passwd")
        (local / "of another").write_text("no business of R's")
        assert files.window_dirs(process.pid, [str(local)]) == ["/"]
        assert files.size([process.pid], [str(local)]) == len("data")
        entries = files.collect(process.pid, images_dir, [str(local)], limit=1 << 20)
        shutil.rmtree(local)
        local.mkdir()

        assert files.put_back(images_dir, entries, dirs=[str(local)]) == []

        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        assert found == ["empty", "inner", "inner/data"]
        assert [path.name for path in local.iterdir()] == [folder.name]
        assert folder.stat().st_mode & 0o777 == 0o700
        output, _ = process.communicate(
            'cat("data", file = f <- file("", "w+b")); cat(readLines(f))\n', 20
        )
        assert output == "data"


def test_no_other_process_has_one(tmp_path: Path) -> None:
    named = f"R_SESSION_TMPDIR={tmp_path}"
    with subprocess.Popen(["env", named, "sleep", "60"]) as process:
        try:
            assert r_session.folders(process.pid) == []
            assert files.window_dirs(process.pid, ["/tmp"]) == ["/tmp"]
        finally:
            process.kill()
    assert r_session.folders(process.pid) == []
