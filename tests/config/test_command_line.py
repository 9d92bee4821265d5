"""The front door: exit codes, sentences instead of tracebacks, and nothing imported before it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import farflung
from coordinator import local
from coordinator.cli import overrides
from coordinator.config import ConfigError, RunConfig, dump, load
from coordinator.run import create_run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder, and no network is ever started."""
    monkeypatch.chdir(tmp_path)

    def started(*_: object) -> None:
        raise AssertionError("a network was started")

    monkeypatch.setattr(local, "Network", started)


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error; argparse exits by itself."""
    try:
        code = farflung.main(list(argv))
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-h"]):
        code, out, _ = call(capsys, *argv)
        assert code == 0 and all(name in out for name in farflung.COMMANDS)
    assert call(capsys)[0] == 2
    code, _, err = call(capsys, "dance")
    assert code == 2 and "dance" in err and "usage" in err
    assert call(capsys, "--version")[1].startswith("farflung ")


@pytest.mark.parametrize("command", farflung.COMMANDS)
def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and command in out


def test_help_imports_no_torch(root: Path) -> None:
    """Nor anything else that is slow: the help is there at once."""
    script = "import sys, farflung; farflung.main(sys.argv[1:]); print(*sorted(sys.modules), file=sys.stderr)"
    slow = {"torch", "transformers", "numpy", "sqlalchemy", "fastapi", "httpx", "pydantic", "coordinator", "node"}
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], cwd=root, capture_output=True, text=True, check=True
    )
    assert not slow & set(done.stderr.split())


def test_dry_run_imports_no_torch(root: Path) -> None:
    script = "import sys, farflung; farflung.main(sys.argv[1:]); print(*sorted(sys.modules), file=sys.stderr)"
    for command in (["up", "--dry-run"], ["coordinator", "--dir", "x", "--dry-run"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            cwd=root,
            env=os.environ | {"FARFLUNG_PARENT_PIPE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not {"torch", "transformers"} & set(done.stderr.split()), command


@pytest.mark.parametrize("command", [("up",), ("coordinator", "--dir", "run")])
def test_dry_run_prints_what_load_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    code, out, _ = call(capsys, *command, "--dry-run", "--trainer.learning_rate", "1e-3", "--schedule.group_size=4")
    assert code == 0
    (tmp_path / "out.toml").write_text(out)
    config = load(tmp_path / "out.toml")
    assert config.trainer.learning_rate == 1e-3 and config.schedule.group_size == 4
    assert config.network.allow_private_relays is (command[0] == "up")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.toml"]  # and makes nothing


def test_dry_run_with_a_file_and_a_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 1\n[trainer]\nwarmup_steps = 2\n")
    code, out, _ = call(capsys, "up", "--config", "mine.toml", "--seed", "9", "--dry-run")
    assert code == 0 and "seed = 9" in out and "warmup_steps = 2" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["--until", "0"],
        ["--until", "1.5"],
        ["--until", "nan"],
        ["--until", "soon"],
        ["--steps", "0"],
        ["--steps", "-1"],
        ["--workers", "-1"],
        ["--workers", "0"],
        ["--cheat", "kindness"],
        ["--seed", "x"],
        ["--no-such-thing", "1"],
        ["--trainer.learning_rate"],
        ["--trainer.learning_rate", "fast"],
        ["--trainer.learning_rate", "-1"],
        ["--schedule.publish_every", "0"],
        ["--task.name", "gym:no_such_data_set"],
        ["--task.options.no_such_option", "1"],
        ["--model.path", "nowhere"],
        ["--sampling.max_tokens", "99999999999"],
        ["--config", "none.toml"],
        ["stray"],
        ["--resume", "--seed", "1"],
        ["--resume", "--trainer.learning_rate", "1"],
    ],
)
def test_usage_errors_of_up(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str]) -> None:
    code, out, err = call(capsys, "up", *argv)
    assert code == 2 and err and not out
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_unusable_run_directories(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(capsys, "up", "--resume")[0] == 4  # there is none
    assert call(capsys, "up", "--resume", "--dir", "none")[0] == 4
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    code, _, err = call(capsys, "up", "--dir", "full")
    assert code == 4 and "not empty" in err
    for command in ("verifier", "trainer", "coordinator"):
        code, _, err = call(capsys, command, "--dir", "none")
        assert code == 4 and "none" in err
        assert call(capsys, command)[0] == 2  # --dir is missing


def test_damaged_run_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", RunConfig())
    run.ledger.close()
    for damage in ("spec.json", "run.toml", "keys/run.pem", "keys/seed.key"):
        path = tmp_path / "run" / damage
        data = path.read_bytes()
        if damage.endswith("seed.key"):
            path.unlink()
        else:
            path.write_bytes(b"rotten")
        for argv in (["up", "--resume", "--dir", "run"], ["trainer", "--dir", "run"]):
            code, _, err = call(capsys, *argv)
            assert code in (2, 4) and len(err.strip().splitlines()) <= 2, (damage, err)
        path.write_bytes(data)


def test_up_never_deletes_what_it_has_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder with the operator's own run.toml in it is no leftover of ours, also if it is the working directory."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.toml").write_text("seed = 1\n")
    (project / "thesis.tex").write_text("precious")
    code, _, err = call(capsys, "up", "--dir", "project", "--config", "project/run.toml")
    assert code == 4 and "not empty" in err
    assert {entry.name for entry in project.iterdir()} == {"run.toml", "thesis.tex"}


def test_up_starts_over_what_was_killed_while_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "run", RunConfig())
    run.ledger.close()
    (tmp_path / "run" / "spec.json").unlink()
    made: list[object] = []

    class Network:
        def __init__(self, run: object, *_: object):
            made.append(run)

        def main(self) -> int:
            return 0

    monkeypatch.setattr(local, "Network", Network)
    assert farflung.main(["up", "--dir", "run", "--steps", "1"]) == 0
    assert (tmp_path / "run" / "spec.json").exists() and made and made[0].key.id != run.key.id  # type: ignore[attr-defined]


def test_configuration_of_a_made_run_is_fixed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    create_run(tmp_path / "run", RunConfig()).ledger.close()
    for argv in (["--init", "--seed", "3"], ["--trainer.learning_rate", "1"], ["--init", "--config", "run/run.toml"]):
        code, _, err = call(capsys, "coordinator", "--dir", "run", *argv)
        assert code == 2 and "configuration" in err
    assert (tmp_path / "run" / "run.toml").read_text() == dump(RunConfig())


@pytest.mark.parametrize("capacity", ["0", "-4", "many"])
def test_worker_usage(capsys: pytest.CaptureFixture[str], capacity: str) -> None:
    assert call(capsys, "worker")[0] == 2
    assert call(capsys, "worker", "--coordinator", "http://127.0.0.1:9", "--capacity", capacity)[0] == 2
    assert call(capsys, "worker", "--coordinator", "http://127.0.0.1:9", "--cheat", "x")[0] == 2


@pytest.mark.parametrize(
    ("rest", "pairs"),
    [
        ([], []),
        (["--a.b", "1"], [("a.b", "1")]),
        (["--a.b=1"], [("a.b", "1")]),
        (["--a.b=x=y"], [("a.b", "x=y")]),
        (["--a.b", "-1", "--c", "d e"], [("a.b", "-1"), ("c", "d e")]),
        (["--a="], [("a", "")]),
    ],
)
def test_overrides(rest: list[str], pairs: list[tuple[str, str]]) -> None:
    assert overrides(rest) == pairs


@pytest.mark.parametrize("rest", [["a"], ["-a", "1"], ["--a"], ["--", "1"], ["--=1"], ["--a", "1", "b"]])
def test_arguments_that_are_no_overrides(rest: list[str]) -> None:
    with pytest.raises(ConfigError):
        overrides(rest)
