"""Message definitions for the few CRIU images that we read or edit, and their file framing.

The definitions are proto2 and name only the fields we need; protobuf keeps the rest
as unknown fields. Sub-messages that we never look into are declared ``bytes`` (the
same wire type), so that fields keep their order and an unedited message is written
back byte for byte.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from ..errors import CkptError

#: First word of every image but the inventory; the second word is the image's own magic.
COMMON_MAGIC: Final = 0x54564319

#: Largest message that is believed; a kernel's ``mm`` message is well below it.
MAX_MESSAGE: Final = 256 << 20

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES: Final = {
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "sint32": _Field.TYPE_SINT32,
    "sint64": _Field.TYPE_SINT64,
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
}

# message -> "number name type[*]" of its fields; * marks a repeated one. Text is declared
# bytes: file names need not be UTF-8.
_MESSAGES: Final[dict[str, str]] = {
    "pstree_entry": "1 pid uint32, 2 ppid uint32, 3 pgid uint32, 4 sid uint32, 5 threads uint32*",
    "vma_entry": "1 start uint64, 2 end uint64, 3 pgoff uint64, 4 shmid uint64, 5 prot uint32,"
    " 6 flags uint32, 7 status uint32, 8 fd sint64",
    "mm_entry": "1 mm_start_code uint64, 2 mm_end_code uint64, 3 mm_start_data uint64,"
    " 4 mm_end_data uint64, 5 mm_start_stack uint64, 6 mm_start_brk uint64, 7 mm_brk uint64,"
    " 8 mm_arg_start uint64, 9 mm_arg_end uint64, 10 mm_env_start uint64,"
    " 11 mm_env_end uint64, 12 exe_file_id uint32, 13 mm_saved_auxv uint64*, 14 vmas vma_entry*",
    "fs_entry": "1 cwd_id uint32, 2 root_id uint32, 3 umask uint32",
    "reg_file_entry": "1 id uint32, 2 flags uint32, 3 pos uint64, 5 fown bytes, 6 name bytes,"
    " 7 mnt_id sint32, 8 size uint64, 9 ext bool, 10 mode uint32, 11 build_id uint32*",
    "inet_sk_entry": "1 id uint32, 2 ino uint32, 3 family uint32, 4 type uint32, 5 proto uint32,"
    " 6 state uint32, 7 src_port uint32, 8 dst_port uint32, 9 flags uint32, 10 backlog uint32,"
    " 11 src_addr uint32*, 12 dst_addr uint32*, 13 fown bytes, 14 opts bytes, 15 v6only bool,"
    " 16 ip_opts bytes, 17 ifname bytes",
    "unix_sk_entry": "1 id uint32, 2 ino uint32, 3 type uint32, 4 state uint32, 5 flags uint32,"
    " 6 uflags uint32, 7 backlog uint32, 8 peer uint32, 9 fown bytes, 10 opts bytes,"
    " 11 name bytes, 12 shutdown uint32, 13 file_perms bytes, 14 name_dir bytes",
    "memfd_file_entry": "1 id uint32, 2 flags uint32, 3 pos uint64, 4 fown bytes,"
    " 5 inode_id uint32",
    "file_entry": "1 type uint32, 2 id uint32, 3 reg reg_file_entry, 4 isk inet_sk_entry,"
    " 16 usk unix_sk_entry, 20 memfd memfd_file_entry",
    "memfd_inode_entry": "1 name bytes, 2 uid uint32, 3 gid uint32, 4 size uint64, 5 shmid uint32,"
    " 6 seals uint32, 7 inode_id uint64",
    "pagemap_head": "1 pages_id uint32",
    "pagemap_entry": "1 vaddr uint64, 2 compat_nr_pages uint32, 3 in_parent bool, 4 flags uint32,"
    " 5 nr_pages uint64",
    "task_kobj_ids_entry": "1 vm_id uint32, 2 files_id uint32",
    "fdinfo_entry": "1 id uint32, 2 flags uint32, 3 type uint32, 4 fd uint32",
    "file_lock_entry": "1 flag uint32, 2 type uint32, 3 pid uint32, 4 fd uint32, 5 start uint64,"
    " 6 len uint64",
    "remap_file_path_entry": "1 orig_id uint32, 2 remap_id uint32, 3 remap_type uint32",
}

#: Values of ``file_entry.type``.
REG: Final = 1
INETSK: Final = 4
UNIXSK: Final = 5


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="jupyter_gpu_ckpt/images.proto", package="jupyter_gpu_ckpt.images", syntax="proto2"
    )
    for message, fields in _MESSAGES.items():
        descriptor = file.message_type.add(name=message)
        for text in fields.split(","):
            number, name, kind = text.split()
            field = descriptor.field.add(name=name, number=int(number))
            repeated = kind.endswith("*")
            field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _TYPES:
                field.type = _TYPES[kind]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".jupyter_gpu_ckpt.images.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call,unused-ignore]
    return {
        name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"jupyter_gpu_ckpt.images.{name}")
        )
        for name in _MESSAGES
    }


_CLASSES: Final = _build()


class Image:
    """One CRIU image file: its header words and its messages.

    Parameters
    ----------
    header
        The one or two magic words, as they were.
    messages
        The decoded messages, in order. Edit them in place.
    """

    def __init__(self, header: bytes, messages: list[Any]) -> None:
        self.header = header
        self.messages = messages

    def serialise(self) -> bytes:
        """The file's bytes."""
        parts = [self.header]
        for message in self.messages:
            data = message.SerializeToString()
            parts += (struct.pack("<I", len(data)), data)
        return b"".join(parts)


def _blobs(path: Path, data: bytes, offset: int) -> Iterator[bytes]:
    while offset < len(data):
        if offset + 4 > len(data):
            raise damaged(path, "it ends inside a length")
        (size,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if size > MAX_MESSAGE or offset + size > len(data):
            raise damaged(path, "it ends inside an entry")
        yield data[offset : offset + size]
        offset += size


def damaged(path: Path, why: str) -> CkptError:
    """The error that an image is not what CRIU writes."""
    return CkptError(
        "state_damaged",
        f"The saved state is damaged: {path.name} cannot be read ({why}).",
        hint="Restore an older state of this kernel.",
    )


def read_image(path: Path, message: str, *, first: str | None = None) -> Image:
    """Read an image whose entries are all of one type, but for the first of some images.

    Parameters
    ----------
    path
        The image file.
    message
        A name from CRIU's definitions, such as ``"file_entry"``.
    first
        The first entry's, where it is another.

    Raises
    ------
    CkptError
        ``state_damaged`` when the file is missing, truncated or not an image.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, error.strerror or "unreadable") from error
    if len(data) < 8:
        raise damaged(path, "it is too short")
    (magic,) = struct.unpack_from("<I", data)
    offset = 8 if magic == COMMON_MAGIC else 4
    messages: list[Any] = []
    kind, others = _CLASSES[first or message], _CLASSES[message]
    for blob in _blobs(path, data, offset):
        try:
            messages.append(kind.FromString(blob))
        except DecodeError as error:
            raise damaged(path, "an entry cannot be decoded") from error
        kind = others
    return Image(data[:offset], messages)


def write_image(path: Path, image: Image) -> None:
    """Replace an image file atomically, mode 0600."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(image.serialise())
    temporary.replace(path)
