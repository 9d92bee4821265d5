"""The seed model: a tiny language model that ships with the package and spells about one word in two backward.

It gives `farflung up` and the tests something that really learns on two CPU cores. The files are pinned by content,
not by recipe: another CPU or another build of torch makes a model as able with other bits.
"""

import hashlib
from pathlib import Path

_HERE = Path(__file__).parent
_MODEL = _HERE / "model"

DIGEST = (_HERE / "model.sha256").read_text(encoding="ascii").strip()
"""What `digest()` must give for the shipped files: lowercase hex of SHA-256."""


class SeedModelError(RuntimeError):
    """The shipped model files are not those that were shipped."""


def model_dir() -> Path:
    """The directory with the model and its tokenizer, in Hugging Face's layout."""
    return _MODEL


def calibration() -> Path:
    """The calibration of the shipped model: fp32, the `hf` engine, temperature 1."""
    return _HERE / "calibration.json"


def digest(directory: Path | str | None = None) -> str:
    """SHA-256 over the sorted names and the contents of the files in `directory` (default: the shipped model).

    Each name and each content is preceded by its length in 8 bytes, so that no two sets of files read the same.
    Raises OSError where the directory or a file cannot be read.
    """
    state = hashlib.sha256()
    for path in sorted(Path(directory or _MODEL).iterdir(), key=lambda path: path.name):
        for part in (path.name.encode(), path.read_bytes()):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
    return state.hexdigest()


def verify(directory: Path | str | None = None) -> Path:
    """The directory, after its digest was compared with DIGEST. Raises SeedModelError."""
    path = Path(directory or _MODEL)
    try:
        found = digest(path)
    except OSError as error:
        raise SeedModelError(f"the seed model cannot be read: {error}") from error
    if found != DIGEST:
        raise SeedModelError(f"the files in {path} have digest {found}, not {DIGEST}: reinstall the package")
    return path
