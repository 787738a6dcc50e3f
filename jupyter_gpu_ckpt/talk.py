"""What a kernel and its server say to each other, on a comm that only they know.

A kernel sends ``comm_msg`` on its iopub channel, signed with its key as all that it says; the
server answers with ``comm_msg`` on the shell channel, which the kernel handles between two cells.
The comm is never opened: pages would close what they do not know. A kernel can speak of itself
only, and needs neither the server's address nor its token.

======================================================  ==========================================
the kernel says                                         meaning
======================================================  ==========================================
``{"ask": "hello", "hooks": bool}``                     it listens; ``hooks``: call before a save
``{"ask": "save", "id", "label"}``                      save this kernel
``{"ask": "states", "id"}``                             what states are there of it
``{"ask": "autosave", "id", "set": {...}, "reset"}``    see or change when it is saved
``{"ask": "ready", "id", "failed": int}``               the callbacks have run
======================================================  ==========================================

The server says ``{"answer": id, "ok": bool, "text": str}`` and ``{"before_save": id}``.
"""

from __future__ import annotations

from typing import Final

#: Id of the comm.
COMM_ID: Final = "jupyter-gpu-ckpt"
