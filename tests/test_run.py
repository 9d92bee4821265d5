"""The front door, on a stand-in for the environment: what it installs, when, and what it hands on."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The interpreter of the environment: everything is the real one's work except what would take minutes.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m pip") [ "$3" = --version ] && exit 0
    echo "pip $*" >>"{calls}"; echo "Collecting something"
    exit "$(cat "{calls}.pip" 2>/dev/null || echo 0)" ;;
"-m ruff" | "-m mypy" | "-m pytest") echo "$*" >>"{calls}"
    exit "$(cat "{calls}.$2" 2>/dev/null || echo 0)" ;;
"-m venv") mkdir -p "$4/bin"; rm -f "$4/installed" "$4/installing"; echo "venv $3" >>"{calls}"
    cp "$0" "$4/bin/python"; exit 0 ;;
esac
exec "{real}" "$@"
"""
FARFLUNG = """#!/bin/sh
echo "farflung $*" >>"{calls}"
[ "${{1:-}}" != wait ] || {{ echo ready; exec sleep 60; }}
exit 7
"""


class Checkout:
    """A copy of `run` and of the two files that it hashes; `calls` is what the stand-ins were asked to do."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path, self.calls = path, path / "calls"
        (path / "requirements").mkdir(parents=True)
        for name in ("run", "pyproject.toml", "requirements/cpu.txt"):
            shutil.copy2(root / name, path / name)
        self.script(path / "python", PYTHON)
        self.env = os.environ | {"PYTHON": str(path / "python"), "FARFLUNG_APT": "0", "FARFLUNG_GPU": "0"}

    def script(self, path: Path, text: str) -> None:
        path.write_text(text.format(calls=self.calls, real=sys.executable))
        path.chmod(0o755)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        if (self.path / ".venv/bin").exists():
            self.script(self.path / ".venv/bin/farflung", FARFLUNG)
        command = ["/bin/sh", self.path / "run", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def log(self) -> list[str]:
        """Calls since the last look."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.write_text("")
        return lines


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Checkout:
    return Checkout(root, tmp_path / "check out")


def pip(extra: str, *rest: str) -> str:
    return " ".join(["pip -m pip install --disable-pip-version-check -e", f".[{extra}]", *rest])


CPU = ("-c", "requirements/cpu.txt")


def test_installs_once_and_hands_on_arguments_and_exit_code(checkout: Checkout) -> None:
    assert checkout.run("install").returncode == 0
    assert checkout.log() == ["venv --clear", pip("all", *CPU)]
    result = checkout.run("up", "--until", "0.7", "--dir", "a b")
    assert result.returncode == 7
    assert checkout.log() == ["farflung up --until 0.7 --dir a b"]
    assert checkout.run("farflung", "doctor").returncode == 7
    assert checkout.log() == ["farflung doctor"]


def test_tests_satisfy_up_but_not_the_other_way(checkout: Checkout) -> None:
    checkout.run("install")
    checkout.log()
    assert checkout.run("test", "-k", "x").returncode == 0
    assert checkout.log() == [pip("test", *CPU), "-m ruff check .", "-m mypy", "-m pytest -k x"]
    assert checkout.run("up").returncode == 7
    assert checkout.log() == ["farflung up"]


@pytest.mark.parametrize("change", ["pyproject.toml", "requirements/cpu.txt"])
def test_changed_requirements_install_again(checkout: Checkout, change: str) -> None:
    checkout.run("install")
    checkout.log()
    with (checkout.path / change).open("a") as file:
        file.write("# changed\n")
    checkout.run("install")
    assert checkout.log() == [pip("all", *CPU)]


def test_gpu_drops_the_constraint(checkout: Checkout) -> None:
    checkout.run("install")
    checkout.log()
    assert checkout.run("--gpu", "install").returncode == 0
    assert checkout.log() == [pip("all", "--upgrade", "--upgrade-strategy", "eager")]


def test_failed_installation_says_why_and_is_tried_again(checkout: Checkout) -> None:
    checkout.run("install")
    (checkout.path / ".venv/installed").unlink()
    Path(f"{checkout.calls}.pip").write_text("1")
    checkout.log()
    result = checkout.run("up")
    assert result.returncode == 1
    assert "Collecting something" in result.stderr and "the installation failed" in result.stderr
    Path(f"{checkout.calls}.pip").unlink()
    assert checkout.run("up").returncode == 7
    assert checkout.log() == [pip("all", *CPU), pip("all", *CPU), "farflung up"]


def test_killed_installation_starts_over(checkout: Checkout) -> None:
    checkout.run("install")
    (checkout.path / ".venv/installed").unlink()
    Path(f"{checkout.calls}.pip").write_text("137")
    assert checkout.run("install").returncode == 1
    Path(f"{checkout.calls}.pip").unlink()
    checkout.log()
    assert checkout.run("install").returncode == 0
    assert checkout.log() == ["venv --clear", pip("all", *CPU)]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_all_three_run_and_one_failure_fails(checkout: Checkout, failing: str) -> None:
    checkout.run("install", "test")
    checkout.log()
    Path(f"{checkout.calls}.{failing}").write_text("1")
    assert checkout.run("test").returncode != 0
    assert checkout.log() == ["-m ruff check .", "-m mypy", "-m pytest"]


def test_signals_reach_the_command(checkout: Checkout) -> None:
    checkout.run("install")
    checkout.script(checkout.path / ".venv/bin/farflung", FARFLUNG)
    command = [checkout.path / "run", "farflung", "wait"]
    with subprocess.Popen(command, env=checkout.env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_no_command_and_no_python(checkout: Checkout) -> None:
    assert checkout.run().returncode == 2
    assert checkout.run("dance").returncode == 2
    tools = checkout.path / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "mkdir"):
        (tools / name).symlink_to(str(shutil.which(name)))
    checkout.env |= {"PATH": str(tools), "PYTHON": ""}
    result = checkout.run("up")
    assert result.returncode == 1 and "no Python 3.11" in result.stderr
