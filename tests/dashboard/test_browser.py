"""The page in a real Chromium: the figures are there, they move, and the console stays silent."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.dashboard.routes import document
from coordinator.ledger import nodes
from tests.dashboard.filled import CHEAT, HONEST, SPEC, Run
from tests.dashboard.test_routes import serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
PATIENCE = 60_000  # milliseconds

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


def watched(browser: Any, scheme: str) -> tuple[Any, list[str]]:
    """A page and the list into which everything goes that it complains of or asks of others."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 1000})
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.on("request", lambda request: "//127.0.0.1:" in request.url or complaints.append(f"left: {request.url}"))
    return page, complaints


def test_page_shows_the_run_and_follows_it(browser: Any, run: Run, tmp_path: Path) -> None:
    expect = sync_api.expect
    expect.set_options(timeout=PATIENCE)
    with run.ledger.write() as tx:  # a label is text, whatever is in it
        tx.exec_driver_sql("update allowlist set label = ? where id = ?", ("<b>cheat</b>", CHEAT))
    page, complaints = watched(browser, "light")
    with serve(lambda: document(run.ledger, SPEC, run.now)) as (url, server):
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#step")).to_have_text("2")
        expect(page.locator("#pass")).to_have_text("15.0% → 55.0%")
        expect(page.locator("#reward")).to_have_text("0.500")
        expect(page.locator("#queue")).to_have_text("4 / 24")
        expect(page.locator("#verdict")).to_have_text("starting")
        expect(page.locator("#nodes tr")).to_have_count(2)
        expect(page.locator("#nodes tr").nth(0)).to_contain_text(HONEST[:12])
        expect(page.locator("#nodes tr").nth(1)).to_contain_text("<b>cheat</b>")
        expect(page.locator("#rejections tr").nth(0)).to_contain_text("not what the slot's seed selects")
        expect(page.locator("#refusals tr").nth(0)).to_contain_text("duplicate")
        for chart in ("reward-chart", "pass-chart"):
            path = page.locator(f"#{chart} path.curve").get_attribute("d")
            assert path.startswith("M") and "NaN" not in path and path.count("L") in (1, 2)
        page.hover("#pass-chart", position={"x": 50, "y": 100})
        expect(page.locator("#pass-chart .tip")).to_have_text("version 0: 15.0%")
        assert HONEST[:13] not in page.content()

        run.judge()
        run.work(HONEST, 2, 2)
        run.judge()
        run.train(3, {"reward_mean": 0.75}, version=3)
        expect(page.locator("#step")).to_have_text("3")
        expect(page.locator("#reward")).to_have_text("0.750")
        assert page.locator("#reward-chart path.curve").get_attribute("d").count("L") == 2
        assert complaints == []
        server.should_exit = True
        expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_reader(browser: Any, run: Run, scheme: str) -> None:
    page, complaints = watched(browser, scheme)
    with serve(lambda: document(run.ledger, SPEC, run.now)) as (url, _):
        page.goto(url)
        sync_api.expect(page.locator("#step")).to_have_text("2", timeout=PATIENCE)
        brightness = page.evaluate(
            "() => ['body', 'h2'].map((s, i) => getComputedStyle(document.querySelector(s))"
            "[i ? 'color' : 'backgroundColor'].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
        )
        assert (brightness[0] > brightness[1]) == (scheme == "light")
        assert abs(brightness[0] - brightness[1]) > 400
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways on a phone"
        page.close()
    assert complaints == []


def test_a_banned_or_silent_node_is_shown_as_such(browser: Any, run: Run) -> None:
    with run.ledger.write() as tx:
        nodes.allow(tx, CHEAT, "cheat-0")
        tx.exec_driver_sql("update allowlist set banned = 1 where id = ?", (CHEAT,))
    page, complaints = watched(browser, "dark")
    with serve(lambda: document(run.ledger, SPEC, run.now + 60)) as (url, _):
        page.goto(url)
        sync_api.expect(page.locator("#nodes tr").nth(0)).to_contain_text("offline", timeout=PATIENCE)
        sync_api.expect(page.locator("#nodes tr").nth(1)).to_contain_text("banned", timeout=PATIENCE)
        page.close()
    assert complaints == []
