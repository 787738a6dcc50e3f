"""A real server of Azure's blob protocol: Azurite, with a container."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.ports import free_port
from tests.harness.s3 import Like, fetched_by, wait_for_port

_ACCOUNT = "tests"
_KEY = base64.b64encode(b"the key of an account in tests").decode()


class AzureServer:
    """Azurite; its data is in memory. It takes about a second to start."""

    bucket = "states-of-tests"
    protocol = "abfs"

    def __init__(self) -> None:
        program = fetched_by("get-azure-server", "node_modules/.bin/azurite-blob")
        self._folder = Path(tempfile.mkdtemp(prefix="azure-server-"))
        self.port = free_port()
        with (self._folder / "out").open("wb") as out:
            self._process = subprocess.Popen(
                # The client's version of the protocol is often newer than any that it knows.
                [program, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent",
                 "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._folder,
                env={"PATH": os.environ["PATH"], "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"},
            )  # fmt: skip
        try:
            wait_for_port(self.port, self._process, self._folder / "out")
            self._make_container()
        except BaseException:
            self.stop()
            raise

    def options(self, port: int) -> dict[str, Any]:
        """See :class:`~.s3.ObjectServer`."""
        return {"connection_string": _connection(port, _KEY)}

    def wrong_options(self, port: int) -> dict[str, Any]:
        """See :class:`~.s3.ObjectServer`."""
        return {"connection_string": _connection(port, base64.b64encode(b"wrong key").decode())}

    def upload(self, name: str) -> Like:
        """See :class:`~.s3.ObjectServer`."""
        return Like("PUT", name)

    def download(self, name: str) -> Like:
        """See :class:`~.s3.ObjectServer`."""
        return Like("GET", name)

    def stop(self) -> None:
        """End it and forget what it stored."""
        self._process.kill()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_container(self) -> None:
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(_connection(self.port, _KEY)) as client:
            client.create_container(self.bucket)


def _connection(port: int, key: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
    )
