"""A file lock held by another process."""

import subprocess
import sys
from pathlib import Path

_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that locks the file like a run, until ``communicate()``."""
    words = [sys.executable, "-c", _HOLD, str(path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process
