"""Print a constraints file with the lowest version of every direct dependency: python .ci/lowest.py [EXTRA ...].

The versions are the lower bounds of pyproject.toml, so that no second list of them can go out of date.
"""

import re
import sys
import tomllib
from pathlib import Path

BOUND = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9][0-9.]*)$")


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement ``name>=version`` as ``name==version``.

    Raises:
        ValueError: a requirement has another form, so that its lowest version is unknown.
    """
    found = []
    for requirement in requirements:
        match = BOUND.match(requirement)
        if match is None:
            raise ValueError(f"pyproject.toml: write {requirement!r} as NAME>=VERSION")
        found.append(f"{match[1]}=={match[2]}")
    return found


def main(extras: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    chosen = [one for extra in extras for one in project["optional-dependencies"][extra]]
    print(*lowest(project["dependencies"] + chosen), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
