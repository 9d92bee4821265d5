"""The JSON form of a calibration. Strict both ways; what the bytes may say is fixed by the dataclasses."""

import json
from dataclasses import asdict, fields
from typing import Any

from toploc.calibration import Calibration, Counts, Distribution, Headroom, Setting
from toploc.judge import Thresholds

FORMAT = "toploc-calibration/1"
MAX_BYTES = 1 << 20


def dumps(calibration: Calibration) -> str:
    """Text with sorted keys. The false-positive bounds are written for the reader; loading holds them to the
    counts."""
    counts = calibration.counts
    document = {"format": FORMAT, "false_positives": _bounds(counts), **asdict(calibration)}
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False)


def loads(text: str | bytes) -> Calibration:
    """Raises ValueError for anything that `dumps` would not have written."""
    if not isinstance(text, str | bytes) or len(text) > MAX_BYTES:
        raise ValueError("not a calibration: wrong type or size")
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("not a calibration: nested too deeply") from error
    names = {"format", "false_positives"} | {field.name for field in fields(Calibration)}
    _keys(document, names, "calibration")
    if document["format"] != FORMAT:
        raise ValueError(f"unknown format {document['format']!r}")
    calibration = Calibration(
        setting=Setting(**_fields(document["setting"], Setting)),
        headroom=Headroom(**_fields(document["headroom"], Headroom)),
        counts=Counts(**_fields(document["counts"], Counts)),
        honest=_distributions(document["honest"]),
        forgeries={
            name: _distributions(f) for name, f in _mapping(document["forgeries"], "forgeries").items()
        },
        thresholds=Thresholds(**_fields(document["thresholds"], Thresholds)),
    )
    if document["false_positives"] != _bounds(calibration.counts):
        raise ValueError("false-positive bounds do not follow from the counts")
    return calibration


def _bounds(counts: Counts) -> dict[str, float]:
    return {"rollout": counts.false_positives_per_rollout, "chunk": counts.false_positives_per_chunk}


def _distributions(value: object) -> dict[str, Distribution]:
    result = {}
    for name, entry in _mapping(value, "distributions").items():
        entry = _fields(entry, Distribution)
        if not isinstance(entry["quantiles"], list):
            raise ValueError("quantiles must be a list")
        result[name] = Distribution(**{**entry, "quantiles": tuple(entry["quantiles"])})
    return result


def _fields(value: object, kind: type[Any]) -> dict[str, Any]:
    return _keys(value, {field.name for field in fields(kind)}, kind.__name__)


def _keys(value: object, names: set[str], what: str) -> dict[str, Any]:
    mapping = _mapping(value, what)
    if set(mapping) != names:
        raise ValueError(f"{what}: expected exactly the keys {sorted(names)}, not {sorted(mapping)}")
    return mapping


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number")
