"""The run as a live table for a terminal, and as one line for a log. Pure: from an overview to something to print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .diagnosis import Diagnosis, Verdict, diagnose
from .ledger.report import Count, NodeReport, Overview, PassRate

SHORT_ID = 12  # hex characters of a node id that are shown
_COLOURS = {Verdict.STARTING: "dim", Verdict.BALANCED: "green"}


def bottleneck(overview: Overview) -> Diagnosis:
    """What limits the run of this overview."""
    return diagnose(
        overview.wait_share,
        overview.queue_fill,
        overview.backpressure_share,
        overview.verifier_backlog_share,
    )


def render(overview: Overview, *, title: str = "farflung") -> RenderableType:
    """A panel of figures and a table of nodes; fits 80 columns."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(overflow="fold")
    for name, value in _figures(overview):
        figures.add_row(name, value)
    return Panel(Group(figures, Text(), _nodes(overview.nodes)), title=Text(title), border_style="dim")


def line(overview: Overview) -> str:
    """One short line for a log without a terminal."""
    version = "-" if overview.newest_version is None else f"v{overview.newest_version}"
    parts = [
        f"step {overview.steps_confirmed} {version}",
        f"reward {_reward(overview)}",
        f"held-out {_pass_rates(overview)}",
        f"accepted {overview.accepted}",
        f"rejected {overview.rejected}",
        f"queue {overview.ready}/{overview.capacity}",
        f"{overview.tokens_per_second:.0f} tok/s",
        bottleneck(overview).verdict.value,
    ]
    return " | ".join(parts)


def size(count: int) -> str:
    """Bytes for people, in powers of 1,000."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.95 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _figures(overview: Overview) -> list[tuple[str, Text]]:
    found = bottleneck(overview)
    verdict = Text.assemble((found.verdict.value, _COLOURS.get(found.verdict, "yellow")), ". ", found.advice)
    version = "none published" if overview.newest_version is None else f"version {overview.newest_version}"
    alive = sum(relay.alive for relay in overview.relays)
    return [
        ("step", Text(f"{overview.steps_confirmed}, {version}")),
        ("reward", Text(_reward(overview))),
        ("held-out", Text(_pass_rates(overview))),
        ("staleness", Text(_staleness(overview))),
        ("queue", Text(f"{overview.ready} ready of {overview.capacity} ({overview.queue_fill:.0%} full)")),
        ("accepted", Text(str(overview.accepted), style="green")),
        ("rejected", Text(_counts(overview.rejected, overview.rejections), style="red" if overview.rejected else "")),
        ("refusals", Text(_counts(sum(c.count for c in overview.refusals), overview.refusals))),
        ("broadcast", Text(f"{size(overview.bytes_published)} published, {alive} relays")),
        ("tokens/s", Text(f"{overview.tokens_per_second:,.0f} accepted")),
        ("bottleneck", verdict),
    ]


def _nodes(nodes: Sequence[NodeReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("node", overflow="ellipsis", no_wrap=True, min_width=8)
    table.add_column("state", no_wrap=True)
    for name in ("v", "tok/s", "accepted", "rejected"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last reason", overflow="fold")
    for node in nodes:
        label = Text(node.label or node.id[:SHORT_ID])
        state = node.status if node.status == "banned" else node.state if node.online else "offline"
        table.add_row(
            label,
            Text(state, style="" if node.online and state != "banned" else "dim"),
            "-" if node.loaded_version is None else str(node.loaded_version),
            f"{node.tokens_per_second:,.0f}",
            str(node.accepted),
            Text(str(node.rejected), style="red" if node.rejected else ""),
            Text(node.last_reason or ""),
        )
    if not nodes:
        table.add_row(Text("none yet", style="dim"))
    return table


def _counts(total: int, counts: Sequence[Count]) -> str:
    reasons = ", ".join(f"{count.code} {count.count}" for count in counts)
    return f"{total} ({reasons})" if reasons else str(total)


def _reward(overview: Overview) -> str:
    value = overview.step_reward if overview.recent_reward is None else overview.recent_reward
    return "-" if value is None else f"{value:.3f}"


def _pass_rate(result: PassRate) -> str:
    return f"{result.rate:.1%}"


def _pass_rates(overview: Overview) -> str:
    if overview.first_pass is None or overview.latest_pass is None:
        return "-"
    if overview.first_pass.version == overview.latest_pass.version:
        return _pass_rate(overview.first_pass)
    return f"{_pass_rate(overview.first_pass)} -> {_pass_rate(overview.latest_pass)}"


def _staleness(overview: Overview) -> str:
    if overview.staleness is None:
        return "-"
    found = overview.staleness
    return (
        f"mean {found.mean:.2f} (in flight {found.in_flight:.2f}), "
        f"highest {found.maximum} of {overview.max_staleness} allowed"
    )
