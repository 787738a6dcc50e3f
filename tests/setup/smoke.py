"""What a set-up is for, once through: `make lab`, a kernel saved, killed and restored.

Needs nothing but the environment that `make dev` makes: run with its Python, in the checkout.
Ends with status 0, or with one line that says what went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir

NOTEBOOK = "sample.ipynb"


class Lab:
    """`make lab`, running."""

    def __init__(self, checkout: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        self.token = secrets.token_hex(16)
        self.environment = {**os.environ, "JUPYTER_TOKEN": self.token}
        self.command = Path(sys.prefix) / "bin/jupyter"
        self.log = checkout / "build" / "smoke.log"
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["make", "lab", f"PORT={port}"],
                cwd=checkout, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        """End it as Ctrl-C twice does."""
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(30)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON answer of the server."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def cli(self, *arguments: str, status: int = 0) -> Any:
        """What `jupyter gpu-ckpt ... --json` says."""
        result = subprocess.run(
            [self.command, "gpu-ckpt", *arguments, "--json", "--url", self.url],
            env=self.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        said = f"{' '.join(arguments)}: status {result.returncode}\n{result.stdout}{result.stderr}"
        check(result.returncode == status, said)
        return json.loads(result.stdout)


def check(condition: object, message: str) -> None:
    """End with a message unless something holds."""
    if not condition:
        sys.exit(f"smoke.py: {message}")


def wait_for(what: str, look: Callable[[], Any], timeout: float) -> Any:
    """The first true value; errors on the way count as not yet."""
    deadline = time.monotonic() + timeout
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if value := look():
                return value
        except (OSError, RuntimeError) as error:
            last = error
        time.sleep(0.1)
    sys.exit(f"smoke.py: {what}: not within {timeout:g} s ({last})")


def execute(kernel_id: str, code: str) -> str:
    """What a cell prints."""
    printed = []

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        printed.append(content.get("text") or content.get("evalue") or "")

    client = BlockingKernelClient(
        connection_file=str(Path(jupyter_runtime_dir()) / f"kernel-{kernel_id}.json")
    )
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        client.execute_interactive(code, timeout=30, output_hook=note)
    finally:
        client.stop_channels()
    return "".join(printed).strip()


def save_and_restore(lab: Lab, kernel_id: str) -> None:
    """Save, then kill: it comes back by itself; then roll back to the state by command."""
    pid = int(execute(kernel_id, "import os; x = 41; print(os.getpid())"))
    saved = lab.cli("save", NOTEBOOK)
    result = saved.get("result") or saved
    state = result["state_id"]
    print(f"saved: {result['size']:,} bytes in {result['seconds']:.2f} s")
    execute(kernel_id, "x = 0")
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "the dead kernel is restored",
        lambda: execute(kernel_id, "print(x + 1)") == "42",
        60,
    )
    execute(kernel_id, "x = 0")
    lab.cli("restore", state)
    found = execute(kernel_id, "print(x + 1)")
    check(found == "42", f"after the restore x + 1 is {found!r}")
    print("restored after its death, and by command")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--capture", choices=("yes", "no"), required=True, help="what to expect")
    options = parser.parse_args()
    lab = Lab(Path.cwd())
    try:
        wait_for(
            f"the server answers (see {lab.log})", lambda: lab.request("GET", "api/status"), 120
        )
        body = {"path": NOTEBOOK, "name": NOTEBOOK, "type": "notebook", "kernel": {}}
        kernel_id = lab.request("POST", "api/sessions", body)["kernel"]["id"]
        can = options.capture == "yes"
        doctor = lab.cli("doctor", status=0 if can else 1)
        check(doctor["can_capture"] is can, f"doctor says {json.dumps(doctor, indent=1)}")
        if can:
            save_and_restore(lab, kernel_id)
        else:
            check(execute(kernel_id, "print(6 * 7)") == "42", "the kernel does not work")
            refused = lab.cli("save", NOTEBOOK, status=1)["error"]
            check(refused["hint"], f"the refusal has no hint: {refused}")
            print(f"refused: {refused['message']} {refused['hint']}")
    except BaseException:
        print(lab.log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        lab.stop()


if __name__ == "__main__":
    main()
