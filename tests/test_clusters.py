"""The batch script of docs/how-to/slurm.md and the Jobs of its Kubernetes pages, with stand-ins for other programs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from patchloom.options.parse import parse_pretrain

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash")

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
SRUN = """#!/bin/bash
echo "$@" >srun
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>scontrol
ls >>scontrol
"""
# prints what --json would, and ends with the code of the file `code`, or waits for SIGTERM, saves, and ends with 130
PATCHLOOM = f"""#!{sys.executable}
import pathlib, signal, sys, time
print("the document", flush=True)
if pathlib.Path("code").exists():
    sys.exit(int(pathlib.Path("code").read_text()))
def save(*_):
    time.sleep(0.5)
    pathlib.Path("saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
time.sleep(60)
sys.exit(1)
"""


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("patchloom", PATCHLOOM)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "bin"


def blocks(page: str, fence: str) -> list[str]:
    return re.findall(rf"^```{fence}\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def submit(programs, tmp_path):
    """Function that starts the script, as SLURM does on the first node; it returns the process."""
    (script,) = blocks("slurm.md", "bash file photos.sbatch")
    (tmp_path / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    text = script.replace("/opt/patchloom/bin/activate", str(tmp_path / "activate"))
    assert text != script
    (tmp_path / "photos.sbatch").write_text(text)

    def start(restarts: int | None = None) -> subprocess.Popen:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
        slurm |= {} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", "photos.sbatch"], cwd=tmp_path, env=os.environ | slurm)

    return start


def stop(job: subprocess.Popen, folder: Path) -> None:
    """Send SIGTERM once the stand-in for patchloom handles it."""
    while not (folder / "ready").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, None, False), (2, None, False), (75, None, True), (75, 19, True), (75, 20, False), (137, 1, True)]
    + [(130, 1, False), (1, None, False)],  # 130: of scancel
)
def test_the_code_decides_whether_the_job_is_queued_again(submit, tmp_path, code, restarts, again):
    (tmp_path / "code").write_text(str(code))
    assert submit(restarts).wait(60) == code
    assert (tmp_path / "scontrol").exists() == again
    words = (tmp_path / "srun").read_text()
    assert "--cpus-per-task=8" in words and "patchloom pretrain /data/photos" in words


@pytest.mark.parametrize(("restarts", "again"), [(3, True), (20, False)])
def test_before_the_time_limit_the_run_is_saved_and_queued_again(submit, tmp_path, restarts, again):
    stop(job := submit(restarts), tmp_path)
    assert job.wait(60) == 130 and (tmp_path / "saved").exists() and (tmp_path / "scontrol").exists() == again
    if again:
        first, *seen = (tmp_path / "scontrol").read_text().split("\n")
        assert first == "requeue 7" and "saved" in seen, "it is queued once the tasks have ended"


@pytest.mark.parametrize("page", ["kubernetes.md", "kubernetes-s3.md"])
def test_the_jobs_start_commands_that_exist(page):
    job = yaml.safe_load(blocks(page, "yaml")[0])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["kind"] == "Job" and container["args"][0] == "pretrain"
    parse_pretrain(container["args"][1:])
    volumes = {one["name"] for one in job["spec"]["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("code", [0, 75, None], ids=["done", "failed", "stopped"])
def test_the_document_of_a_pod_is_written_to_a_file(programs, tmp_path, code):
    (lines,) = [one for one in map(yaml.safe_load, blocks("kubernetes.md", "yaml")) if "command" in one]
    script = lines["args"][0].replace("/work/", f"{tmp_path}/").replace("/dev/termination-log", f"{tmp_path}/message")
    if code is not None:
        (tmp_path / "code").write_text(str(code))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen([*lines["command"], script], cwd=tmp_path, env=os.environ | {"PATH": path})
    if code is None:
        stop(job, tmp_path)
    assert job.wait(60) == (130 if code is None else code)
    assert (tmp_path / "photos-mae.json").read_text() == "the document\n"
    assert (tmp_path / "message").exists() == (code != 0) and (tmp_path / "saved").exists() == (code is None)
