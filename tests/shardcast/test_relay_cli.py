"""The commands as processes: ready file, signals, a parent that dies, registration, pinning, kill and resume."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
from aiohttp import web
from shardcast_net import KEY, OTHER_KEY, RUN_ID, Origin, checkpoint, files_of, serving

from protocol.identity import Key
from protocol.reasons import Reason, Refusal
from shardcast import cli, control
from shardcast.store import ShardStore
from shardcast.trust import shards_of, stored_pin

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.network


async def start(command: str, *options: str, **environment: str) -> asyncio.subprocess.Process:
    program = f"import sys; from shardcast.cli import {command}; sys.exit({command}(sys.argv[1:]))"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *options, cwd=ROOT, env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def ready(path: Path, process: asyncio.subprocess.Process) -> str:
    while not path.exists():
        assert process.returncode is None, (await process.communicate())[1].decode()
        await asyncio.sleep(0.02)
    return json.loads(path.read_text())["url"]


@asynccontextmanager
async def relay_process(
    folder: Path, *options: str, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A relay on a free port; killed at the end if it still runs."""
    file = folder.parent / f"{folder.name}-{time.monotonic_ns()}.json"
    defaults = ("--listen", "127.0.0.1:0", "--dir", str(folder), "--ready-file", str(file))
    process = await start("relay", *defaults, *options, **environment)
    try:
        yield process, await ready(file, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def wait_version(url: str, version: int) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/healthz") as response:
                if (await response.json())["version"] == version:
                    return
            await asyncio.sleep(0.02)


def limited(main) -> None:  # type: ignore[no-untyped-def]
    async def inner() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(inner())


def test_relay_and_fetch(tmp_path: Path) -> None:
    """First use of the key over loopback, registration by the relay's own key, fetch through the relay, clean end."""

    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await origin.publish(folder, 1, now=time.time())
            async with relay_process(tmp_path / "r", "--upstream", origin.url) as (process, url):
                await wait_version(url, 1)
                await origin.on_register.wait()
                relay_key = Key.load(tmp_path / "r" / "relay.key")
                assert origin.registered[0] == (relay_key.id, url)
                pin = stored_pin(tmp_path / "r" / "pin.json")
                assert pin is not None and (pin.run_key, pin.run_id, pin.highest) == (KEY.id, RUN_ID, 1)
                origin.relays = (url,)
                shards = origin.count("/v1/shards")
                fetch = await start(
                    "fetch", "--coordinator", f"{origin.url}#run={KEY.id}", "--dir", str(tmp_path / "f"), "--json", "-"
                )
                out, err = await fetch.communicate()
                assert fetch.returncode == 0, err.decode()
                report = json.loads(out)
                assert report["name"] == manifest.name and report["path"] == str(tmp_path / "f" / manifest.name)
                assert files_of(Path(report["path"])) == files_of(folder)
                assert origin.count("/v1/shards") == shards  # all bytes came from the relay
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 30) == 0

    limited(main)


def test_killed_relay_resumes(tmp_path: Path) -> None:
    async def main() -> None:
        blocked = asyncio.Event()

        async def hang(origin: Origin, request: web.Request) -> None:
            if request.path.endswith(last):
                blocked.set()
                await asyncio.sleep(3600)

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1, now=time.time())
            shards = list(dict.fromkeys(shards_of(manifest)))
            last = shards[-1].sha256
            origin.override = hang  # type: ignore[assignment]
            options = ("--upstream", origin.url, "--no-register", "--run-key", KEY.id)
            async with relay_process(tmp_path / "r", *options) as (process, url):
                await blocked.wait()
                store = ShardStore(tmp_path / "r")
                while len(list(store.shards())) < len(shards) - 1:
                    await asyncio.sleep(0.02)
                async with aiohttp.ClientSession() as session, session.get(url + "/v1/head") as response:
                    assert response.status == 503
                process.send_signal(signal.SIGKILL)
                await process.wait()
            origin.override = None
            origin.asked.clear()
            async with relay_process(tmp_path / "r", *options) as (process, url):
                await wait_version(url, 1)
            assert [path for path in origin.asked if "shards" in path] == [f"/v1/shards/{last}"]
            assert list(store.scratch.iterdir()) == []
            assert origin.count("/v1/relays") == 0

    limited(main)


@pytest.mark.parametrize("watched", [True, False])
def test_ends_with_its_parent(tmp_path: Path, watched: bool) -> None:
    async def main() -> None:
        environment = {"FARFLUNG_PARENT_PIPE": "1" if watched else "0"}
        options = ("--upstream", "http://127.0.0.1:1", "--no-register", "--run-key", KEY.id)
        async with relay_process(tmp_path / "r", *options, **environment) as (process, url):
            assert process.stdin is not None
            process.stdin.close()
            if watched:
                assert await asyncio.wait_for(process.wait(), 30) == 0
            else:
                async with aiohttp.ClientSession() as session, session.get(url + "/healthz") as response:
                    assert response.status == 200
                assert process.returncode is None

    limited(main)


SLOW = [pytest.param(pin, marks=pytest.mark.slow) for pin in ("option", "fragment")]


@pytest.mark.parametrize("pin", ["folder", *SLOW])
def test_a_changed_run_key_is_a_hard_stop(tmp_path: Path, pin: str) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"), OTHER_KEY)) as origin:
            folder, upstream, options = tmp_path / "r", origin.url, []
            if pin == "option":
                options = ["--run-key", KEY.id]
            elif pin == "fragment":
                upstream += f"#run={KEY.id}"
            else:
                folder.mkdir()
                document = {"run_key": KEY.id, "run_id": RUN_ID, "highest": None}
                (folder / "pin.json").write_text(json.dumps(document))
            process = await start(
                "relay",
                "--listen",
                "127.0.0.1:0",
                "--dir",
                str(folder),
                "--upstream",
                upstream,
                "--no-register",
                *options,
            )
            _, err = await process.communicate()
            assert process.returncode == 1 and b"run_key_changed" in err, err
            fetch = await start("fetch", "--dir", str(folder), "--coordinator", upstream, *options)
            _, err = await fetch.communicate()
            assert fetch.returncode == 1 and b"run_key_changed" in err, err

    limited(main)


def test_first_use_needs_tls_or_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--listen", "127.0.0.1:0", "--dir", str(tmp_path / "r"), "--upstream", "http://192.0.2.1:9"]
    assert cli.relay(base) == 1
    assert "--run-key" in capsys.readouterr().err
    assert cli.fetch(["--coordinator", "http://192.0.2.1:9", "--dir", str(tmp_path / "f")]) == 1
    assert "forbidden" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--upstream", "ftp://x"],
        ["--upstream", "http://user@x"],
        ["--upstream", ","],
        ["--upstream", "http://x/?q=1"],
        ["--upstream", "http://127.0.0.1:99999"],
        ["--upstream", "http://x", "--listen", "1.2.3.4"],
        ["--upstream", "http://x", "--listen", "1.2.3.4:99999"],
        ["--upstream", "http://x", "--keep", "0"],
    ],
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.relay(options)
    assert caught.value.code == 2 and "usage" in capsys.readouterr().err


def test_pinned_key() -> None:
    url, other = f"http://x#run={KEY.id}", f"http://y#run={OTHER_KEY.id}"
    assert control.pinned_key(None, ["http://x"], None) is None
    for found in (
        control.pinned_key(KEY.id, [], None),
        control.pinned_key(None, [url], None),
        control.pinned_key(KEY.id, [url, "http://z"], KEY.id),
    ):
        assert found == KEY.id
    for clash in ((KEY.id, [other], None), (None, [url, other], None), (None, [other], KEY.id)):
        with pytest.raises(Refusal) as caught:
            control.pinned_key(*clash)
        assert caught.value.reason is Reason.RUN_KEY_CHANGED
    for bad in ("http://x#run=1", "http://x#key=1", f"{url}&run={KEY.id}", "http://x#run=" + "0" * 64):
        with pytest.raises(Refusal) as caught:
            control.pinned_key(None, [bad], None)
        assert caught.value.reason is Reason.WEAK_KEY


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://example.org", True), ("http://127.0.0.1:1", True), ("http://127.8.9.1", True),
        ("http://[::1]:1", True), ("http://localhost:1", True), ("http://localhost.example.org", False),
        ("http://10.0.0.1", False),
        ("http://127.0.0.1.example.org", False), ("http://[fe80::1]", False),
    ],
)  # fmt: skip
def test_first_use(url: str, allowed: bool) -> None:
    assert control.first_use_allowed(url) is allowed


@pytest.mark.parametrize("attack", ["unsigned", "other key", "altered", "not json", "endless", "redirect", "error"])
def test_answers_of_the_coordinator_are_checked(tmp_path: Path, attack: str) -> None:
    """Only a forged success is a changed key; what a proxy says in the coordinator's place is a failure to retry."""

    async def main() -> None:
        async def forge(origin: Origin, request: web.Request) -> web.Response | None:
            body = origin.run_info().model_dump_json().encode()
            if attack == "other key":
                origin.key = OTHER_KEY
                return origin._signed(request, body)
            if attack == "altered":
                response = origin._signed(request, body)
                response.body = body.replace(b'"newest":null', b'"newest":9999')
                return response
            plain = {"unsigned": body, "not json": b"<html>", "endless": bytes(2 << 20)}
            if attack in plain:
                return web.Response(body=plain[attack])
            return web.Response(status=307 if attack == "redirect" else 502, headers={"Location": "/"}, body=body)

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin, control.new_client() as client:
            info = await control.get_run(client, origin.url, KEY.id)
            assert info.run_spec.run_id == RUN_ID
            assert info == await control.get_run(client, origin.url, None)
            origin.override = forge
            expected = Refusal if attack in ("unsigned", "other key", "altered") else control.ControlFailed
            with pytest.raises(expected) as caught:
                await control.get_run(client, origin.url, KEY.id)
            if isinstance(caught.value, Refusal):
                assert caught.value.reason is Reason.RUN_KEY_CHANGED

    limited(main)


def test_registration_answers_are_bound_to_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin, control.new_client() as client:
            relay_key = Key.from_seed(b"\x09" * 32)

            async def register() -> None:
                await control.register(
                    client, origin.url, key=relay_key, run_key=KEY.id, run_id=RUN_ID, public_url="http://r.example",
                    now=time.time(),
                )  # fmt: skip

            await register()
            assert origin.registered == [(relay_key.id, "http://r.example")]
            kept: list[web.Response] = []

            async def replay(origin: Origin, request: web.Request) -> web.Response:
                if not kept:
                    kept.append(origin._signed(request, b"{}"))
                return web.Response(body=b"{}", headers=kept[0].headers)

            origin.override = replay
            await register()
            with pytest.raises(Refusal) as caught:
                await register()
            assert caught.value.reason is Reason.RUN_KEY_CHANGED

    limited(main)


def test_urls_keep_no_fragment() -> None:
    urls = control.base_urls([f"http://x:1/#run={KEY.id}", "http://x:1", "https://y/base/"])
    assert urls == ["http://x:1", "https://y/base"]
    assert urlsplit(urls[0]).fragment == "" and httpx.URL(urls[1]).path == "/base"
