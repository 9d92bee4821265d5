"""The live table and the log line."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from coordinator.ledger.report import Count, Overview, overview
from coordinator.live import line, render, size
from tests.dashboard.filled import SPEC, Run


@pytest.fixture
def found(run: Run) -> Overview:
    with run.ledger.read() as tx:
        return overview(tx, SPEC, now=run.now)


def text(found: Overview, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render(found, title="a run"))
    return out.getvalue()


def test_table_names_every_figure(found: Overview) -> None:
    shown = text(found)
    for part in (
        "a run",
        "2, version 2",
        "0.500",
        "15.0% -> 55.0%",
        "highest 0 of 2 allowed",
        "4 ready of 24 (17% full)",
        "4 (sampling_mismatch 3, bad_termination 1)",
        "4 (duplicate 3, queue_full 1)",
        "3.0 MB published, 1 relays",
        "starting",
        "honest-0",
        "cheat-0",
        "generating",
    ):
        assert part in shown, part


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_fits_its_width(found: Overview, width: int) -> None:
    lines = text(found, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("cheat" in shown for shown in lines)


def test_labels_are_text_not_markup(found: Overview) -> None:
    sly = replace(found, nodes=(replace(found.nodes[0], label="[red]x[/red]"),))
    assert "[red]x[/red]" in text(sly)


def test_offline_and_banned(found: Overview) -> None:
    away = replace(found.nodes[0], online=False)
    assert "offline" in text(replace(found, nodes=(away,)))
    assert "banned" in text(replace(found, nodes=(replace(away, status="banned"),)))


def test_line_is_one_short_line(found: Overview) -> None:
    shown = line(found)
    assert shown == (
        "step 2 v2 | reward 0.500 | held-out 15.0% -> 55.0% | accepted 20 | rejected 4 | queue 4/24 | 11 tok/s"
        " | starting"
    )


def test_nothing_measured_yet(found: Overview) -> None:
    bare = replace(
        found,
        newest_version=None,
        steps_confirmed=0,
        first_pass=None,
        latest_pass=None,
        recent_reward=None,
        step_reward=None,
        staleness=None,
        nodes=(),
        rejections=(Count("x", 1),),
    )
    assert line(bare).startswith("step 0 - | reward - | held-out - |")
    assert "none published" in text(bare) and "none yet" in text(bare)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (999_400, "999 kB"), (999_500, "1.0 MB")]
    + [(2_500_000_000, "2.5 GB"), (7 * 10**12, "7.0 TB")],
)
def test_sizes(count: int, words: str) -> None:
    assert size(count) == words
