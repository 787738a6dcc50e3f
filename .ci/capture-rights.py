"""Say after the set-up whether kernels can be captured here, and if not what is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CAPABILITIES = "cap_checkpoint_restore,cap_net_admin,cap_setpcap=p"


def main() -> None:
    """Ask ``kernel-capture probe`` and print its answer in a few lines."""
    program = Path(sys.argv[1]).absolute()
    try:
        result = subprocess.run(
            [program, "probe"], capture_output=True, text=True, timeout=30, check=False
        )
        probe = json.loads(result.stdout.splitlines()[0])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        sys.exit(f"{program} does not run: {error}")
    if probe["can_capture"]:
        print("Kernels can be captured here: Save kernel state is ready.")
        return
    print("Set up, but kernels cannot be captured here yet:")
    for problem in probe["problems"]:
        print(f"  * {problem['message']}")
        if problem.get("hint"):
            print(f"    {problem['hint']}")
    if probe["uid"] != 0:
        get_criu = Path(__file__).absolute().parent.parent / "native/scripts/get-criu"
        print("An administrator allows it, for whoever may run the program, with:")
        print(f"  sudo {get_criu}")
        print(f"  sudo setcap {CAPABILITIES} {program}    (package libcap2-bin)")


if __name__ == "__main__":
    main()
