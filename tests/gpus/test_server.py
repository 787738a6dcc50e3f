"""A server on a machine with GPUs: who asks the driver, and what is said of the GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.harness.client import API
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.simgpu.simgpu import SimulatedMachine, gpu


def test_states_and_doctor_tell_the_gpus_while_the_server_has_no_library_of_them(
    tmp_path: Path,
) -> None:
    machine = SimulatedMachine(tmp_path / "machine", [gpu(name="NVIDIA L4", persistence=True)])
    try:
        with (
            shared_folder("gpu-server") as folder,
            JupyterServer(Home(folder / "home"), environment=machine.environment()) as server,
        ):
            kernel = server.client.start(server.home.add_notebook("gpus.ipynb"))
            kernel.run("x = 41")
            first = server.client.save(kernel)["state_id"]
            state = server.client.get(f"{API}states/{first}")
            assert state["node"]["gpus"] == ["NVIDIA L4"]
            # The kernel has nothing on it: its state can be restored wherever there is none.
            assert state["restorable"] and not state["differences"]
            checks = server.client.get(f"{API}doctor")["checks"]
            said = {check["name"]: check["message"] for check in checks}
            assert said["GPU 0"].startswith(f"NVIDIA L4, {machine.gpus[0]['uuid']}: ")
            mapped = {Path(one.path).name for one in server.process.memory_maps()}
            assert not [name for name in mapped if "nvidia" in name or "cuda" in name]
            server.client.restore(first)
            assert kernel.run("print(x + 1)") == "42"
    finally:
        machine.stop()
