"""Dockerfile interpreter without Docker: instructions, lint rules, and the resulting folders.

Only the instructions of this repository's Dockerfile are supported; all others raise an error.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """Instruction: its name in capitals, and the rest of its lines."""

    name: str
    text: str


def parse(text: str) -> list[Instruction]:
    """Parse the instructions of a Dockerfile, with continued lines joined and comments removed."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        Instruction(name.upper(), rest) for name, _, rest in (one.partition(" ") for one in whole.split("\n")) if name
    ]


def faults(found: list[Instruction]) -> list[str]:
    """Return a sentence for each violated rule for small and safe images."""
    said, stages = [], set()
    for name, text in found:
        if name == "FROM":
            image, *named = text.split()
            if image not in stages and (":" not in image or image.endswith(":latest")):
                said.append(f"{image} may be another image tomorrow: name a version")
            stages |= set(named[1:])
        elif name == "ADD":
            said.append("ADD fetches and unpacks what it is given: use COPY")
        elif name == "RUN" and "apt-get install" in text:
            if "--no-install-recommends" not in text or "rm -rf /var/lib/apt/lists" not in text:
                said.append("apt-get install leaves what nobody asked for")
        elif name in ("ENTRYPOINT", "CMD") and not text.startswith("["):
            said.append(f"{name} by a shell, which keeps signals from the program: write a list")
    if any(name == "RUN" and "pip install" in text for name, text in found):
        if not any(name == "ENV" and "PIP_NO_CACHE_DIR=1" in text for name, text in found):
            said.append("pip leaves its cache: ENV PIP_NO_CACHE_DIR=1")
    last = max((i for i, one in enumerate(found) if one.name == "FROM"), default=0)
    users = [text for name, text in found[last:] if name == "USER"]
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        said.append("it runs as root: end with USER")
    return said


def context(root: Path) -> list[str]:
    """Return the files of a folder that .dockerignore does not exclude; the last matching pattern decides."""
    patterns = [line.strip() for line in (root / ".dockerignore").read_text().splitlines() if line.strip()]
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in names if not _ignored(name, patterns))


def _ignored(name: str, patterns: list[str]) -> bool:
    ignored = False
    for pattern in patterns:
        again, wanted = pattern.startswith("!"), pattern.removeprefix("!")
        anywhere, wanted = wanted.startswith("**/"), wanted.removeprefix("**/")
        assert "/" not in wanted, f"a pattern of several folders is not understood: {pattern}"
        parts = name.split("/") if anywhere else name.split("/")[:1]
        if any(fnmatch(part, wanted) for part in parts):
            ignored = not again
    return ignored


@dataclass
class Image:
    """Result of following a Dockerfile.

    Attributes:
        root: folder in place of /.
        env: variables of the last stage.
        said: LABEL, USER, WORKDIR, ENTRYPOINT and CMD of the last stage.
        passed: skipped RUN lines.
    """

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)

    def on_host(self, text: str) -> str:
        """Replace the image's folders in a text by those on this machine."""
        return re.sub(r"(?<![\w./])/(?=(opt|source|wheel|cache|work)\b)", f"{self.root}/", text)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the entry point with arguments in the working folder, with only the image's variables."""
        command = [*json.loads(self.said["ENTRYPOINT"]), *words]
        folder = self.on_host(self.said["WORKDIR"])
        env = {**self.env, "OMP_NUM_THREADS": "1"}
        found = shutil.which(command[0], path=env["PATH"])
        assert found, f"there is no {command[0]} on {env['PATH']}"
        return subprocess.run([found, *command[1:]], cwd=folder, env=env, capture_output=True, text=True)


def follow(found: list[Instruction], source: Path, root: Path, args: dict[str, str], offline: dict[str, str]) -> Image:
    """Follow a Dockerfile in a folder with this machine's Python and packages.

    Args:
        found: its instructions. RUN lines that would change this machine (useradd) are skipped.
        source: source folder of COPY.
        root: empty folder in place of / for the image's folders.
        args: values of --build-arg.
        offline: variables of RUN lines that prevent downloads.
    """
    image, scope, left = Image(root), {}, dict(args)
    path = f"{Path(sys.executable).parent}:{os.defpath}"
    for name, text in found:
        if name == "FROM":
            image.env, image.said, scope = {"PATH": path}, {}, {}
        elif name == "ARG":
            option, _, default = text.partition("=")
            scope[option] = args.get(option, shlex.split(default)[0] if default else "")
            left.pop(option, None)
        elif name == "ENV":
            for pair in shlex.split(text):
                option, _, value = pair.partition("=")
                image.env[option] = image.on_host(value).replace("$PATH", image.env["PATH"])
        elif name == "COPY":
            _copy(image, text, source)
        elif name == "RUN" and "useradd" in text:
            image.passed.append(text)
        elif name == "RUN":
            env = {**image.env, **scope, **offline}
            done = subprocess.run(["sh", "-ec", image.on_host(text)], env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            if " -m venv " in text:
                _lend(Path(image.on_host(text.split()[-1])))
        else:
            assert name in ("LABEL", "USER", "WORKDIR", "ENTRYPOINT", "CMD"), f"{name} is not understood"
            image.said[name] = text
    assert not left, f"the Dockerfile takes no {', '.join(left)}"
    return image


def _copy(image: Image, text: str, source: Path) -> None:
    *sources, to = text.split()
    if sources[0].startswith("--from="):
        assert sources[1:] == [to], f"a copy to another place is not understood: {text}"
        return
    there = context(source)
    for wanted in sources:
        files = [name for name in there if name == wanted or name.startswith(f"{wanted}/")]
        assert files, f".dockerignore leaves nothing of {wanted}"
        for name in files:
            target = Path(image.on_host(to)) / name.removeprefix(wanted).lstrip("/")
            target = target / wanted if name == wanted else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)


def _lend(venv: Path) -> None:
    """Let a virtual environment find the packages of the one that runs the tests."""
    (inside,) = venv.glob("lib/python*/site-packages")
    (inside / "lent.pth").write_text(sysconfig.get_path("purelib"))
