"""Ed25519 identities: weak keys, encodings, key files."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from protocol.identity import Key, is_hex64, public_key, verify
from protocol.reasons import Reason, Refusal

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    """Edwards addition (RFC 8032 §5.1.4, affine)."""
    (x1, y1), (x2, y2) = a, b
    t = D * x1 * x2 * y1 * y2
    return (
        (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P,
        (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P,
    )


def multiply(n: int, point: Point) -> Point:
    out = (0, 1)
    while n:
        if n & 1:
            out = add(out, point)
        point, n = add(point, point), n >> 1
    return out


def decode(y: int) -> Point | None:
    """A point with this y, if there is one."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (x, y) if x * x % P == square else None


def torsion() -> list[Point]:
    """The eight points whose order divides the cofactor, from a point of order 8."""
    for y in range(2, 100):
        point = decode(y)
        if point is not None and multiply(4, low := multiply(L, point)) != (0, 1):
            return [multiply(n, low) for n in range(8)]
    raise AssertionError


def encodings(point: Point) -> list[str]:
    """Every 32-byte string that a lenient decoder takes for this point."""
    x, y = point
    ys = [y, y + P] if y + P < 2**255 else [y]
    signs = [0, 1] if x == 0 else [x & 1]
    return [(value | sign << 255).to_bytes(32, "little").hex() for value in ys for sign in signs]


SMALL = torsion()
WEAK = sorted({text for point in SMALL for text in encodings(point)})


def test_there_are_eight_points_with_fourteen_encodings() -> None:
    assert len(set(SMALL)) == 8 and all(multiply(8, point) == (0, 1) for point in SMALL)
    assert len(WEAK) == 14


@pytest.mark.parametrize("weak", WEAK)
def test_small_order_is_refused(weak: str) -> None:
    for attempt in (lambda: public_key(weak), lambda: verify(weak, bytes(64), b"anything")):
        with pytest.raises(Refusal) as caught:
            attempt()
        assert caught.value.reason is Reason.WEAK_KEY


def test_why_small_order_is_refused() -> None:
    identity = (1).to_bytes(32, "little")
    anything = Ed25519PublicKey.from_public_bytes(identity)
    # R = A = the neutral point and S = 0 verify for every message
    anything.verify(identity + bytes(32), b"one message")
    anything.verify(identity + bytes(32), b"another message")


@pytest.mark.parametrize("y", [P, P + 1, P + 2, P + 18, 2**255 - 1])
@pytest.mark.parametrize("sign", [0, 1])
def test_non_canonical_y_is_refused(y: int, sign: int) -> None:
    with pytest.raises(Refusal) as caught:
        public_key((y | sign << 255).to_bytes(32, "little").hex())
    assert caught.value.reason is Reason.WEAK_KEY


KEY = Key.from_seed(bytes(range(32)))


@pytest.mark.parametrize(
    "text",
    ["", KEY.id[:-1], KEY.id + "0", KEY.id.upper(), KEY.id + "\n", "0x" + KEY.id[2:], " " + KEY.id[1:], "\uff41" * 64],
)
def test_ids_have_one_spelling(text: str) -> None:
    assert not is_hex64(text)
    with pytest.raises(Refusal):
        public_key(text)


@pytest.mark.parametrize("value", [None, 5, b"a" * 64, ["a"] * 64])
def test_only_text_is_an_id(value: object) -> None:
    assert not is_hex64(value)


def test_sign_and_verify() -> None:
    """RFC 8032 §7.1, test 1."""
    key = Key.from_seed(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.id == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    assert verify(key.id, key.sign(b"m"), b"m")
    assert not verify(key.id, key.sign(b"m"), b"n")
    assert not verify(KEY.id, key.sign(b"m"), b"m")


@pytest.mark.parametrize("length", [0, 1, 32, 63, 65, 128])
def test_signatures_of_other_lengths_do_not_verify(length: int) -> None:
    assert not verify(KEY.id, bytes(length), b"m")


def test_malleated_signature_does_not_verify() -> None:
    signature = KEY.sign(b"m")
    s = int.from_bytes(signature[32:], "little") + L
    assert not verify(KEY.id, signature[:32] + s.to_bytes(32, "little"), b"m")


def test_id_off_the_curve_verifies_nothing() -> None:
    off = next(y for y in range(2, 100) if decode(y) is None)
    assert not verify(off.to_bytes(32, "little").hex(), bytes(64), b"m")


def test_key_file_is_for_the_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.pem"
    old = os.umask(0)
    try:
        KEY.save(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load(path).id == KEY.id
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Key.generate().save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["node.pem"]


def test_interrupted_save_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key file that exists is whole: load_or_create would trip over half of one for ever."""
    path = tmp_path / "node.pem"

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError):
            Key.load_or_create(path)
    assert list(tmp_path.iterdir()) == []
    assert Key.load_or_create(path).id == Key.load_or_create(path).id


def test_the_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.pem"
    fresh = Key.generate()

    def slow() -> Key:
        KEY.save(path)
        return fresh

    monkeypatch.setattr(Key, "generate", slow)
    assert Key.load_or_create(path).id == KEY.id


def test_other_files_are_not_keys(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ValueError):
        Key.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError):
        Key.load(path)
    with pytest.raises(OSError):
        Key.load(tmp_path / "missing")


def test_private_key_is_not_in_the_repr() -> None:
    private = KEY.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    assert private.splitlines()[1] not in repr(KEY) and bytes(range(32)).hex() not in repr(KEY)
