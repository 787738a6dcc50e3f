"""What a kernel had that is not in its saved state, for the models and in a reader's words."""

from __future__ import annotations

from typing import Literal

import msgspec


class OutsideConnection(msgspec.Struct, frozen=True):
    """A connection that a state's kernel had to a program that is not in the state.

    ``address`` is the other end's, and for ``unix`` the path of its socket. ``port`` is the one
    that was connected to, so the kernel's own for an ``incoming`` connection. ``service`` is what
    usually answers there, ``count`` how many there were. A restore leaves TCP connections closed,
    and connects the others (datagrams) again where it can.
    """

    protocol: Literal["tcp", "udp", "unix"]
    address: str
    port: int | None = None
    service: str | None = None
    incoming: bool = False
    count: int = 1

    def __str__(self) -> str:
        """As it is told to a reader."""
        if self.protocol == "unix":
            return f"service {self.address}"
        address = f"[{self.address}]" if ":" in self.address else self.address
        service = f" ({self.service})" if self.service else ""
        if self.protocol == "udp":
            return f"UDP service {address}:{self.port}{service}"
        what = "connection" if self.count == 1 else f"{self.count} connections"
        if self.incoming:
            return f"{what} from {self.address} to port {self.port}"
        return f"{what} to {address}:{self.port}{service}"


class OutsideFile(msgspec.Struct, frozen=True):
    """A file that is not in a state and that its kernel had mapped or open to write to it."""

    path: str
    mode: Literal["write", "append", "map"]

    def __str__(self) -> str:
        """As it is told to a reader."""
        use = {"write": "written", "append": "appended to", "map": "mapped"}[self.mode]
        return f"file {self.path} ({use})"


class Outside(msgspec.Struct, frozen=True):
    """What a kernel had when it was saved that is not in the state.

    Files and ``devices`` are opened again by a restore, as they are then, and have to be there.
    ``left_out`` is how many more there were than are listed.
    """

    connections: list[OutsideConnection] = []
    devices: list[str] = []
    files: list[OutsideFile] = []
    left_out: int = 0

    def closed(self) -> list[str]:
        """What will not come back, as it is told to a reader."""
        return [str(found) for found in self.connections if found.protocol == "tcp"]

    def required(self) -> list[str]:
        """Paths of files without which no restore succeeds; of cut ones no path is known."""
        return [file.path for file in self.files if file.path.startswith("/")]

    def needed(self) -> list[str]:
        """What a restore has to find, or looks for, as it is told to a reader."""
        return [
            *(str(found) for found in self.connections if found.protocol != "tcp"),
            *(f"device {path}" for path in self.devices),
            *map(str, self.files),
        ]
