"""Ed25519 identities (RFC 8032): node, relay and run keys. An id is the lowercase hex of the public key."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from .reasons import Reason, Refusal

_P = 2**255 - 19
_SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        _P - 1,
        int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"),
        int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"),
    }
)
_HEX64 = re.compile(r"[0-9a-f]{64}")


def is_hex64(text: object) -> bool:
    """True for 64 lowercase hex characters: an id or a SHA-256 digest."""
    return isinstance(text, str) and _HEX64.fullmatch(text) is not None


def public_key(node_id: str) -> Ed25519PublicKey:
    """The public key of an id. Raises Refusal(weak_key) for anything but a canonical key of full order:
    with a key of small order one signature verifies for every message."""
    if not is_hex64(node_id):
        raise Refusal(Reason.WEAK_KEY, "an id is 64 lowercase hex characters")
    raw = bytes.fromhex(node_id)
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    if y >= _P or y in _SMALL_ORDER_Y:
        raise Refusal(Reason.WEAK_KEY)
    return Ed25519PublicKey.from_public_bytes(raw)


def verify(node_id: str, signature: bytes, message: bytes) -> bool:
    """True if `signature` over `message` is by the key `node_id`."""
    try:
        public_key(node_id).verify(signature, message)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True)
class Key:
    """An Ed25519 private key with its id."""

    private: Ed25519PrivateKey
    id: str

    @classmethod
    def generate(cls) -> Key:
        """A fresh key."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Key:
        """The key of a 32-byte seed (RFC 8032 §5.1.5)."""
        return cls._of(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def _of(cls, private: Ed25519PrivateKey) -> Key:
        return cls(private, private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex())

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`."""
        return self.private.sign(message)

    def save(self, path: Path) -> None:
        """Write as PEM, readable by the owner only, whole or not at all. Raises FileExistsError, OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        pem = self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # unlike a rename, never over an existing file
        finally:
            temporary.unlink()

    @classmethod
    def load(cls, path: Path) -> Key:
        """Read a PEM key. Raises ValueError if it is not an Ed25519 key, OSError if it cannot be read."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        private = load_pem_private_key(path.read_bytes(), None)
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError(f"{path} holds no Ed25519 key")
        return cls._of(private)

    @classmethod
    def load_or_create(cls, path: Path) -> Key:
        """The key in `path`; made on first use."""
        if not path.exists():
            try:
                cls.generate().save(path)
            except FileExistsError:  # another process was faster
                pass
        return cls.load(path)
