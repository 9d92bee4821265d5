"""Calibration: what `calibrate` measures, and for which runs a calibration is accepted."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from coordinator import seed, tasks
from coordinator.run import Run
from coordinator.tasks.prompts import PromptCodec
from coordinator.verifier.calibrate import calibrate, load_calibration
from node.engines.base import Request
from node.engines.hf import HFEngine
from protocol.runspec import RunSpec
from toploc import Calibration


def test_shipped_calibration_is_for_the_seed_model(run: Run) -> None:
    calibration = load_calibration(run.calibration_path, run.spec)
    assert calibration.setting.model_digest == run.spec.model.base_weights_digest
    assert calibration.counts.rollouts >= 1000 and calibration.counts.false_positives_per_rollout < 0.01
    for name, limit in dataclasses.asdict(calibration.thresholds).items():
        assert math.isfinite(limit) and limit >= 0, name


def _other(spec: RunSpec, part: str, **changes: Any) -> RunSpec:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("model", {"base_weights_digest": "0" * 64}),
        ("model", {"dtype": "bfloat16"}),
        ("sampling", {"temperature": 0.5}),
        ("proof", {"chunk_rows": 16}),
        ("proof", {"top_k": 64}),
    ],
)
def test_calibration_for_something_else_is_refused(run: Run, part: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="calibrat"):
        load_calibration(run.calibration_path, _other(run.spec, part, **changes))


def test_no_calibration_and_a_broken_one(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_calibration(tmp_path / "none.json", run.spec)
    text = run.calibration_path.read_text()
    for broken in ("", "{}", text[:-20], text.replace('"margin_max": ', '"margin_max": -')):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ValueError):
            load_calibration(tmp_path / "broken.json", run.spec)


def test_calibrate_on_sixty_rollouts(run: Run) -> None:
    """Few rollouts give thresholds of the same size as the shipped ones, and honest maxima below them."""
    codec, task = PromptCodec(seed.model_dir()), tasks.load("gym:spell_backward", 12345)
    prompts = [tuple(codec.encode(task.problem(index).messages)) for index in range(60)]
    found = calibrate(
        seed.model_dir(),
        prompts,
        HFEngine,
        Request,
        model_digest=run.spec.model.base_weights_digest,
        dtype="float32",
        temperature=1.0,
        max_tokens=10,
    )
    assert found.counts.rollouts == 60 and found.counts.tokens > 60 * 4
    assert found.honest["largest_margin"].maximum <= found.thresholds.margin_max < 0.01
    assert found.honest["logprob_gap"].maximum < found.thresholds.logprob_gap < 0.01
    assert found.honest["disagreements"].maximum <= 1
    again = Calibration.from_json(found.to_json())
    assert again == found
    path = run.path / "own.json"
    path.write_text(found.to_json())
    assert load_calibration(path, run.spec) == found
