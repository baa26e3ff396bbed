"""Container image: the Dockerfile keeps the rules of small and safe images; it is built and run where docker exists."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = "7.8.9"
SHORT = "digits --task mae --epochs 0.2 --model nano --model.embed_dim 32 --model.depth 1".split()
SHORT += "--device cpu --precision float32 --workers 0".split()


def parse(text: str) -> list[tuple[str, str]]:
    """Return name and rest of each instruction of a Dockerfile, with continued lines joined and comments removed."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (one.partition(" ") for one in whole.split("\n")) if name]


FOUND = parse((ROOT / "Dockerfile").read_text())


def run_lines(word: str) -> list[str]:
    return [text for name, text in FOUND if name == "RUN" and word in text]


def test_it_keeps_the_rules_of_small_and_safe_images():
    """No tag moves, ADD fetches nothing, no cache stays, signals arrive, and it does not run as root."""
    last = dict(FOUND)
    images = [text.split()[0] for name, text in FOUND if name == "FROM"]
    assert images and all(re.search(r":\d", image) for image in images) and "ADD" not in last
    assert all(
        "--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text for text in run_lines("apt-get")
    )
    assert any(name == "ENV" and "PIP_NO_CACHE_DIR=1" in text for name, text in FOUND)
    assert last["ENTRYPOINT"] == '["patchloom"]' and last["USER"] == "patchloom"


def test_only_what_the_package_needs_is_copied_and_torch_is_that_of_pyproject():
    copied = [text.split()[:-1] for name, text in FOUND if name == "COPY" and "--from" not in text]
    allowed = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")]
    assert (ROOT / ".dockerignore").read_text().split()[0] == "*"
    assert sorted(sum(copied, [])) == sorted(allowed) and all((ROOT / name).exists() for name in allowed)
    wanted = re.findall(r'^    "(torch(?:vision)?>=[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (line,) = run_lines("--index-url")
    assert len(wanted) == 2 and re.findall(r'"(torch[^"]+)"', line) == wanted


@pytest.mark.parametrize("extras, asked", [("audio,dense", "/w.whl[audio,dense]"), ("", "/w.whl")])
def test_any_extras_or_none_can_be_asked_for(extras, asked):
    (line,) = run_lines("$EXTRAS")
    line = line.replace("/opt/patchloom/bin/pip install", "echo").replace("$(echo /wheel/*.whl)", "/w.whl")
    done = subprocess.run(["sh", "-ec", line], env={"EXTRAS": extras}, capture_output=True, text=True)
    assert done.stdout == f"{asked}\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CI"), reason="fetches gigabytes: set CI=1 to build the image, too")
def test_it_is_built_and_run(tmp_path):
    engine = next(filter(shutil.which, ("docker", "podman")), None)
    if engine is None or subprocess.run([engine, "info"], capture_output=True, timeout=60).returncode:
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
