"""Container image: the Dockerfile keeps the rules and makes a working patchloom; it is built where docker exists."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from dockerfile import Image, Instruction, context, faults, follow, parse

ROOT = Path(__file__).parents[1]
FOUND = parse((ROOT / "Dockerfile").read_text())
VERSION = "7.8.9"
SHORT = "digits --task mae --epochs 0.2 --model nano --model.embed_dim 32 --model.depth 1".split()
# little is measured, which takes long on a busy machine; what is goes into the cache
SHORT += "--device cpu --precision float32 --workers 0".split()
# the packages are those of this environment, and nothing is downloaded; pip's "no isolation" is written as a 0
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Image:
    """A folder made by the commands of the Dockerfile, without docker."""
    return follow(FOUND, ROOT, tmp_path_factory.mktemp("image"), {"VERSION": VERSION, "EXTRAS": "dense"}, OFFLINE)


def test_it_keeps_the_rules_of_small_and_safe_images():
    assert faults(FOUND) == []


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("USER patchloom\n", "", "as root"),
        ("USER patchloom\n", "USER 0:0\n", "as root"),
        ("USER patchloom\n", "USER patchloom\nUSER root\n", "as root"),
        ("FROM python:3.12-slim AS", "FROM python AS", "name a version"),
        ("FROM python:3.12-slim\n", "FROM python:latest\n", "name a version"),
        ("COPY src", "ADD src", "use COPY"),
        (" && rm -rf /var/lib/apt/lists/*", "", "nobody asked"),
        ("--no-install-recommends ", "", "nobody asked"),
        ("PIP_NO_CACHE_DIR=1", "", "cache"),
        ('ENTRYPOINT ["patchloom"]', "ENTRYPOINT patchloom", "signals"),
    ],
)
def test_a_broken_rule_is_found(old, new, said):
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert any(said in one for one in faults(parse(text.replace(old, new))))


def test_lines_are_joined_and_comments_left_out():
    text = "# a comment\nFROM a:1\nRUN one && \\\n    # within\n    two\n\nUSER me\n"
    assert parse(text) == [Instruction("FROM", "a:1"), Instruction("RUN", "one && two"), Instruction("USER", "me")]


def test_only_what_the_package_needs_is_given_to_the_builder(tmp_path):
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    given = ["LICENSE", "README.md", "pyproject.toml", "src/patchloom/a.py"]
    for name in (*given, "src/patchloom/__pycache__/a.pyc", "photos/a.jpg", ".git/config", ".env", "runs/x/log.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert context(tmp_path) == given


def test_torch_is_asked_for_as_in_pyproject():
    wanted = re.findall(r'^    "(torch(?:vision)?>=[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (line,) = (text for name, text in FOUND if name == "RUN" and "--index-url" in text)
    assert len(wanted) == 2 and re.findall(r'"(torch[^"]+)"', line) == wanted


@pytest.mark.parametrize("extras, asked", [("audio,dense", "/w.whl[audio,dense]"), ("", "/w.whl")])
def test_any_extras_or_none_can_be_asked_for(extras, asked):
    (line,) = (text for name, text in FOUND if name == "RUN" and "$EXTRAS" in text)
    line = line.replace("/opt/patchloom/bin/pip install", "echo").replace("$(echo /wheel/*.whl)", "/w.whl")
    done = subprocess.run(["sh", "-ec", line], env={"EXTRAS": extras}, capture_output=True, text=True)
    assert done.stdout == f"{asked}\n"


def test_a_version_that_is_given_is_the_image_s(image):
    done = image.run("--version")
    assert (done.stdout, done.stderr) == (f"{VERSION}\n", "")


def test_nothing_but_a_user_is_left_to_docker(image):
    assert image.passed == ["useradd --uid 1000 patchloom"] and image.said["USER"] == "patchloom"


def test_the_main_job_runs_and_writes_into_the_mounted_folder_and_the_cache_alone(image):
    done = image.run("pretrain", *SHORT)
    assert done.returncode == 0, done.stderr
    assert (image.root / "work" / "runs" / "digits-mae" / "encoder.safetensors").is_file()
    assert {path.name for path in (image.root / "work").iterdir()} == {"runs"}
    assert {"patchloom", "matplotlib"} <= {path.name for path in (image.root / "cache").iterdir()}
    assert [(image.root / name).stat().st_mode & 0o7777 for name in ("work", "cache")] == [0o1777] * 2


def _engine() -> str | None:
    """Return docker or podman, if it responds."""
    for name in ("docker", "podman"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, timeout=60).returncode:
            return name
    return None


@pytest.mark.skipif(not os.environ.get("CI"), reason="fetches gigabytes: set CI=1 to build the image, too")
def test_it_is_built_and_run(tmp_path):
    if (engine := _engine()) is None:
        pytest.skip("neither docker nor podman works here")
    given = ["--build-arg", f"VERSION={VERSION}", "--build-arg", f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"]
    subprocess.run([engine, "build", *given, "--tag", "patchloom-test", "."], cwd=ROOT, check=True)
    mine = f"{os.getuid()}:{os.getgid()}"
    run = [engine, "run", "--rm", "--network", "none", "--user", mine, "--volume", f"{tmp_path}:/work"]
    run += ["patchloom-test"]
    assert subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout.strip() == VERSION
    subprocess.run([*run, "pretrain", *SHORT], check=True)
    encoder = tmp_path / "runs" / "digits-mae" / "encoder.safetensors"
    assert (encoder.stat().st_uid, encoder.stat().st_gid) == (os.getuid(), os.getgid())
