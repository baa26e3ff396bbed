"""The batch script of docs/how-to/slurm.md, with stand-ins for srun, scontrol and patchloom."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash")

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "slurm.md"
SRUN = """#!/bin/bash
echo "$@" >srun
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>scontrol
ls >>scontrol
"""
# ends with the code of the file `code`, or waits for SIGTERM, takes a while to save, and ends with 130
PATCHLOOM = f"""#!{sys.executable}
import pathlib, signal, sys, time
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
def submit(tmp_path):
    """Function that starts the script, as SLURM does on the first node; it returns the process."""
    (script,) = re.findall(r"^```bash file photos.sbatch\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    activate = tmp_path / "activate"
    activate.write_text(f'export PATH="{tmp_path / "bin"}:$PATH"\n')
    text = script.replace("/opt/patchloom/bin/activate", str(activate))
    assert text != script
    (tmp_path / "photos.sbatch").write_text(text)
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("patchloom", PATCHLOOM)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(restarts: int | None = None) -> subprocess.Popen:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
        slurm |= {} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", "photos.sbatch"], cwd=tmp_path, env=os.environ | slurm)

    return start


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, None, False),
        (2, None, False),
        (75, None, True),
        (75, 19, True),
        (75, 20, False),
        (137, 1, True),
        (130, 1, False),  # of scancel
        (1, None, False),
    ],
)
def test_the_code_decides_whether_the_job_is_queued_again(submit, tmp_path, code, restarts, again):
    (tmp_path / "code").write_text(str(code))
    assert submit(restarts).wait(60) == code
    assert (tmp_path / "scontrol").exists() == again
    words = (tmp_path / "srun").read_text().split()
    assert "--cpus-per-task=8" in words and words[words.index("patchloom") :][:3] == [
        "patchloom",
        "pretrain",
        "/data/photos",
    ]


@pytest.mark.parametrize(("restarts", "again"), [(3, True), (20, False)])
def test_before_the_time_limit_the_run_is_saved_and_queued_again(submit, tmp_path, restarts, again):
    job = submit(restarts)
    while not (tmp_path / "ready").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130 and (tmp_path / "saved").exists()
    if again:
        first, *seen = (tmp_path / "scontrol").read_text().split("\n")
        assert first == "requeue 7" and "saved" in seen, "it is queued once the tasks have ended"
    else:
        assert not (tmp_path / "scontrol").exists()
