"""Keys: where they come from, what they seal, and what nobody can do without them."""

from __future__ import annotations

import base64
import os
import secrets
import stat
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.damage import Damaged
from jupyter_gpu_ckpt.store.keys import (
    Key,
    KeyCommand,
    KeyFile,
    KeyRing,
    KeyVariable,
    new_key_file,
    parse_key,
)
from jupyter_gpu_ckpt.store.seal import KeySealing, NullSealing, manifest_packs

SECRET = bytes(range(32))
PACK = "20261202T010203Z-0123abcd-0000"
CONTEXT = b"kernel/20261202T010203Z-0123abcd"
BODY = b'{"format":2,"packs":{"20261202T010203Z-0123abcd-0000":17},"id":"x"}'


def key_file(folder: Path, secret: bytes = SECRET, name: str = "key") -> KeyFile:
    path = folder / name
    path.write_text(secret.hex() + "\n")
    path.chmod(0o600)
    return KeyFile(path)


def sealing(ring: KeyRing, owner: str = "ada") -> KeySealing:
    return KeySealing(ring, owner, NullSealing(bytes(32)), frozenset)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(key_file(tmp_path))


# -- where keys come from -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        SECRET.hex(),
        SECRET.hex().upper() + "\n",
        f"\n# a remark\n  {SECRET.hex()}  \r\n\n",
        base64.b64encode(SECRET).decode(),
        base64.urlsafe_b64encode(SECRET).decode().rstrip("="),
    ],
)
def test_a_key_is_read_as_hex_or_base64(text: str) -> None:
    assert parse_key(text, "x") == Key(SECRET)


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a remark", "abc", "g" * 64, "00" * 31, f"{'00' * 32}\n{'00' * 32}"]
)
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(CkptError) as caught:
        parse_key(text, "the file /k")
    assert caught.value.reason == "wrong_key"
    shown = f"{caught.value.as_dict()} {caught.value!r}"
    assert "the file /k" in shown
    assert len(text) < 3 or text not in shown


def test_a_key_does_not_show_itself() -> None:
    key = Key(SECRET)
    assert SECRET.hex() not in repr(key) and repr(SECRET) not in repr(key)
    assert len(key.id) == 16 and key.id not in SECRET.hex()


def test_a_new_key_is_private_and_replaces_none(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = new_key_file(tmp_path / "key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    key = KeyRing(KeyFile(tmp_path / "key")).current()
    assert key is not None and key.id == made
    text = (tmp_path / "key").read_text()
    with pytest.raises(CkptError, match="never overwritten"):
        new_key_file(tmp_path / "key")
    assert (tmp_path / "key").read_text() == text
    assert new_key_file(tmp_path / "other") != made


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    spec = key_file(tmp_path)
    spec.path.chmod(mode)
    with pytest.raises(CkptError) as caught:
        KeyRing(spec).current()
    assert caught.value.reason == "key_missing"
    assert "chmod 600" in str(caught.value.hint)


@pytest.mark.root
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    spec = key_file(tmp_path)
    os.chown(spec.path, 12345, 12345)
    with pytest.raises(CkptError, match="another user"):
        KeyRing(spec).current()


def test_a_key_file_may_be_a_link_as_containers_have_it(tmp_path: Path) -> None:
    spec = key_file(tmp_path)
    (tmp_path / "link").symlink_to(spec.path)
    assert KeyRing(KeyFile(tmp_path / "link")).current() == Key(SECRET)


def test_what_is_no_file_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(CkptError) as caught:
            KeyRing(KeyFile(path)).current()
        assert caught.value.reason == "key_missing"


def test_a_key_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_KEY", SECRET.hex())
    assert KeyRing(KeyVariable("CKPT_TEST_KEY")).current() == Key(SECRET)
    with pytest.raises(CkptError, match="OTHER_KEY: it is not set"):
        KeyRing(KeyVariable("OTHER_KEY")).current()


def test_a_key_that_a_command_prints(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = f"open({str(calls)!r}, 'a').write('x'); print({SECRET.hex()!r})"
    ring = KeyRing(KeyCommand((sys.executable, "-c", program)))
    assert ring.current() == ring.current() == Key(SECRET)
    assert calls.read_text() == "x", "a command is run once"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('0123456789secret'); raise SystemExit(3)", "status 3"),
        ("print('0123456789secret', flush=True); import time; time.sleep(60)", "within 0.5 s"),
        ("print('0123456789secret')", "not a key"),
    ],
)
def test_a_command_that_fails(tmp_path: Path, program: str, why: str) -> None:
    calls = tmp_path / "calls"
    program = f"open({str(calls)!r}, 'a').write('x'); {program}"
    ring = KeyRing(KeyCommand((sys.executable, "-c", program)), command_timeout=0.5)
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(CkptError, match=why) as caught:
            ring.current()
        assert "0123456789secret" not in f"{caught.value.as_dict()} {caught.value.__cause__!r}"
    assert time.monotonic() - began < 20
    assert calls.read_text() == "x", "it is not run again for each state of a list"


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(CkptError, match="No such file") as caught:
        KeyRing(KeyCommand(("/no/such/program", "--token", "s3cret"))).current()
    assert "s3cret" not in str(caught.value.as_dict())


# -- what they seal --------------------------------------------------------------------------


@given(plain=st.binary(max_size=300), number=st.integers(0, 2**32 - 1), flip=st.integers(0))
def test_a_blob_comes_back_or_is_damaged(plain: bytes, number: int, flip: int) -> None:
    seal = sealing(KeyRing(_Fixed(SECRET)))
    salt = seal.new_salt()
    sealed = bytes(seal.sealer(PACK, salt, seal.key_id).seal(number, memoryview(plain)))
    reading = seal.sealer(PACK, salt, seal.key_id)
    assert len(sealed) == len(plain) + reading.overhead
    assert reading.open(number, memoryview(sealed)) == plain
    room = memoryview(bytearray(len(plain) + 5))
    assert reading.open(number, memoryview(sealed), room) == plain
    altered = bytearray(sealed)
    altered[flip % len(altered)] ^= 1 << flip % 8
    for wrong in (altered, sealed[:-1], b""):
        for into in (None, room):
            with pytest.raises(Damaged):
                reading.open(number, memoryview(wrong), into)
    with pytest.raises(Damaged):
        reading.open(number ^ 1, memoryview(sealed))


class _Fixed(KeyVariable):
    """A key that comes from nowhere."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(f"fixed-{secret.hex()[:4]}")
        object.__setattr__(self, "secret", secret)

    def text(self, timeout: float) -> str:
        return self.secret.hex()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("cipher", [1, 2])
def test_both_ciphers_are_read_whatever_this_machine_prefers(ring: KeyRing, cipher: int) -> None:
    seal = sealing(ring)
    salt = bytes((cipher,)) + secrets.token_bytes(15)
    sealed = bytes(seal.sealer(PACK, salt, seal.key_id).seal(1, memoryview(b"plain")))
    assert seal.sealer(PACK, salt, seal.key_id).open(1, memoryview(sealed)) == b"plain"


def test_a_sealed_blob_is_bound_to_its_pack_owner_and_salt(ring: KeyRing) -> None:
    seal = sealing(ring)
    salt = seal.new_salt()
    sealed = memoryview(seal.sealer(PACK, salt, seal.key_id).seal(0, memoryview(b"plain")))
    for wrong in (
        seal.sealer(PACK[:-1] + "1", salt, seal.key_id),
        seal.sealer(PACK, seal.new_salt(), seal.key_id),
        sealing(ring, "eve").sealer(PACK, salt, seal.key_id),
    ):
        with pytest.raises(Damaged):
            wrong.open(0, sealed)


def test_equal_blobs_look_different_in_every_pack(ring: KeyRing) -> None:
    seal = sealing(ring)
    seen = set()
    for owner in ("ada", "eve"):
        for _ in range(3):
            sealer = sealing(ring, owner).sealer(PACK, seal.new_salt(), seal.key_id)
            seen |= {bytes(sealer.seal(number, memoryview(b"same"))) for number in range(3)}
    assert len(seen) == 18


def test_no_nonce_is_used_twice(ring: KeyRing) -> None:
    seal = sealing(ring)
    sealer = seal.sealer(PACK, seal.new_salt(), seal.key_id)
    sealer.seal(0, memoryview(b"a"))
    with pytest.raises(RuntimeError):
        sealer.seal(0, memoryview(b"b"))


def test_a_manifest_opens_in_its_place_only(ring: KeyRing) -> None:
    seal = sealing(ring)
    data = seal.seal_manifest(BODY, CONTEXT)
    assert seal.open_manifest(data, CONTEXT) == BODY
    assert b"format" not in data
    assert manifest_packs(data) == manifest_packs(seal._plain.seal_manifest(BODY, CONTEXT))
    for other, context in (
        (seal, b"other/20261202T010203Z-0123abcd"),
        (sealing(ring, "eve"), CONTEXT),
    ):
        with pytest.raises(Damaged):
            other.open_manifest(data, context)


def test_no_byte_of_a_sealed_manifest_can_be_altered(ring: KeyRing) -> None:
    seal = sealing(ring)
    data = seal.seal_manifest(BODY, CONTEXT).rstrip()
    for at in range(len(data)):
        altered = bytearray(data)
        altered[at] ^= 1
        with pytest.raises((Damaged, CkptError)):
            seal.open_manifest(bytes(altered), CONTEXT)
        if at % 16 == 0:
            with pytest.raises((Damaged, CkptError)):
                seal.open_manifest(data[:at], CONTEXT)


# -- which key -------------------------------------------------------------------------------


def test_rotation(tmp_path: Path) -> None:
    old, new = key_file(tmp_path), key_file(tmp_path, bytes(32), "new")
    before = sealing(KeyRing(old))
    data, salt = before.seal_manifest(BODY, CONTEXT), before.new_salt()
    blob = memoryview(before.sealer(PACK, salt, before.key_id).seal(0, memoryview(b"plain")))
    after = sealing(KeyRing(new, [old]))
    assert after.key_id != before.key_id
    assert after.open_manifest(data, CONTEXT) == BODY
    assert after.sealer(PACK, salt, before.key_id).open(0, blob) == b"plain"
    forgot = sealing(KeyRing(new))
    for call in (
        lambda: forgot.open_manifest(data, CONTEXT),
        lambda: forgot.sealer(PACK, salt, before.key_id),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "wrong_key"
        assert str(before.key_id) in caught.value.message
        assert "old_key_files" in str(caught.value.hint)
    assert after.open_manifest(after.seal_manifest(BODY, CONTEXT), CONTEXT) == BODY
    off = sealing(KeyRing(None, [old]))
    assert off.key_id is None
    assert off.open_manifest(data, CONTEXT) == BODY
    plain = off.seal_manifest(BODY, CONTEXT)
    assert off.open_manifest(plain, CONTEXT) == BODY


def test_no_key(ring: KeyRing) -> None:
    seal = sealing(ring)
    data = seal.seal_manifest(BODY, CONTEXT)
    none = NullSealing(bytes(32))
    for call in (
        lambda: none.open_manifest(data, CONTEXT),
        lambda: none.sealer(PACK, none.new_salt(), seal.key_id),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "key_missing"
        assert "key_file" in str(caught.value.hint)


def test_an_unreadable_key_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = sealing(KeyRing(KeyFile(tmp_path / "key")))
    with pytest.raises(CkptError, match="No such file") as caught:
        _ = seal.key_id
    assert caught.value.reason == "key_missing"
    key_file(tmp_path)
    monkeypatch.setattr("jupyter_gpu_ckpt.store.keys._RETRY_SECONDS", 0.0)
    assert seal.key_id == Key(SECRET).id


def test_a_forged_manifest_without_a_key_does_not_pass(ring: KeyRing) -> None:
    """Its checksum is right: the key for that lies in the store."""
    forged = NullSealing(bytes(32)).seal_manifest(BODY, CONTEXT)
    with pytest.raises(CkptError) as caught:
        sealing(ring).open_manifest(forged, CONTEXT)
    assert caught.value.reason == "not_restorable"
