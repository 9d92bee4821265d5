"""The project as it is handed over: the wheel, the images, and what no tracked file may say."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("protocol", "toploc", "shardcast", "node", "coordinator")
IMAGES = {"worker-node": "worker", "coordinator": "coordinator", "relay": "relay"}
FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.}$/-])/(?:home|root|Users|work)/\w"),
    "the host of a package registry": re.compile(
        r"\b(?:pypi|npmjs|pythonhosted|rubygems|crates|anaconda|conda)\.(?:org|com|io|python\.org)\b"
        r"|\b(?:deb|security|ftp)\.debian\.org\b|\bdocker\.(?:io|com)\b|\bghcr\.io\b|\bquay\.io\b"
        r"|\bdownload\.pytorch\.org\b|\bregistry\.yarnpkg\.com\b"
    ),
}
SECRET = re.compile(r"^\s*(?:ARG|ENV)\b.*(?:TOKEN|SECRET|PASSWORD|_KEY)", re.IGNORECASE | re.MULTILINE)


def tracked(root: Path) -> Iterator[Path]:
    """Files that are, or are about to be, part of the project."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in sorted(set(filter(None, listing.stdout.split("\0")))):
        if (root / name).is_file():
            yield root / name


def offences(text: str) -> list[str]:
    """What a text says that it must not, with the line's number."""
    return [
        f"{number}: {what}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


@pytest.fixture(scope="module")
def needs_git(root: Path) -> None:
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: no list of tracked files")


@pytest.mark.usefixtures("needs_git")
def test_tracked_files_name_no_machine_and_no_registry(root: Path) -> None:
    found = {}
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if lines := offences(text):
            found[str(path.relative_to(root))] = lines
    assert found == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = '" + "/".join(["", "home", "somebody", "x"]) + "'", 1),
        ("open(" + "/".join(["", "work", "main"]) + ")", 1),
        ("index: https://" + ".".join(["pypi", "org"]) + "/simple", 1),
        ("FROM " + ".".join(["docker", "io"]) + "/library/python", 1),
        ("GET /v1/work/items, $HOME/work/x, ./work/x", 0),
    ],
)
def test_offences_are_seen(text: str, count: int) -> None:
    assert len(offences(text)) == count


@pytest.mark.usefixtures("needs_git")
def test_wheel_holds_the_packages_and_nothing_else(root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for path in tracked(root):
        target = tree / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
    command = [sys.executable, "-m", "pip", "wheel", *options, tree]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = tmp_path.glob("farflung-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = next(archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    bench = ["bench"] if (root / "bench").is_dir() else []
    assert {name.split("/")[0] for name in held} == {*PACKAGES, *bench, "farflung.py"}
    assert "farflung = farflung:main" in scripts
    expected = {
        path.relative_to(root).as_posix()
        for path in tracked(root)
        if path.relative_to(root).parts[0] in {*PACKAGES, *bench, "farflung.py"}
    }
    assert held == expected
    assert {"coordinator/seed/model/config.json", "coordinator/seed/model/model.safetensors"} <= held
    assert not [name for name in held if "test" in Path(name).stem.split("_") or "tests" in name.split("/")]


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_hadolint(root: Path, image: str) -> None:
    tool = Path(sys.executable).with_name("hadolint")
    hadolint = str(tool) if tool.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (it comes with the test extra where there is a build)")
    file = root / "docker" / f"{image}.Dockerfile"
    lint = subprocess.run(
        [hadolint, "--failure-threshold", "warning", str(file)], capture_output=True, text=True, check=False
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_image_is_unprivileged_and_runs_as_written(root: Path, image: str) -> None:
    text = (root / "docker" / f"{image}.Dockerfile").read_text()
    stages = re.split(r"^FROM\b", text, flags=re.MULTILINE)
    assert len(stages) == 3, "one stage builds, one runs"
    lines = [line for line in stages[-1].splitlines() if line and not line.startswith((" ", "#"))]
    last = [line.split(maxsplit=1) for line in lines]
    (user,) = [rest for keyword, rest in last if keyword == "USER"]
    (entry,) = [json.loads(rest) for keyword, rest in last if keyword == "ENTRYPOINT"]
    assert user.isdigit() and int(user) > 0
    assert entry[:2] == ["farflung", IMAGES[image]]
    assert "CMD" not in [keyword for keyword, _ in last], "arguments of docker run would replace it"
    assert ["VOLUME", "/data"] in last
    assert "HEALTHCHECK" in [keyword for keyword, _ in last]
    assert SECRET.search(text) is None


# What an image's documentation passes, and what no extra of the image brings: importing it would break the container.
HELP = {
    "worker-node": ({"--coordinator"}, {"fastapi", "sqlalchemy", "reasoning_gym"}),
    "coordinator": (set(), set()),
    "relay": (
        {"--upstream"},
        {"fastapi", "sqlalchemy", "reasoning_gym", "torch", "transformers", "peft", "safetensors", "numpy"},
    ),
}


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_entry_point_knows_its_flags_and_needs_only_its_extra(root: Path, image: str) -> None:
    text = (root / "docker" / f"{image}.Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, flags=re.MULTILINE)
    arguments = json.loads(entry)
    flags, absent = HELP[image]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(absent)}));"
        f"sys.argv = {[*arguments, '--help']}; import farflung; sys.exit(farflung.main())"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for flag in flags | {argument for argument in arguments if argument.startswith("--")}:
        assert re.search(rf"(?<![\w-]){flag}\b", shown.stdout), flag


def test_image_context_admits_only_what_is_built_from(root: Path) -> None:
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    admitted = {line[1:].rstrip("/") for line in lines if line.startswith("!")}
    assert {*PACKAGES, "farflung.py", "pyproject.toml", "README.md", "LICENSE"} <= admitted
    assert admitted.isdisjoint({".git", ".venv", "tests", "docs"})
