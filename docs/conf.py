"""Sphinx configuration: a site of the Markdown files of this repository, and of a page for every public module.

``sphinx-build -W -c docs . site`` builds it, and fails on broken links and references. Nothing is listed by hand: this
file writes the pages of the modules from the tree, and docs/README.md defines the order of the others.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"  # not in git
KINDS = {
    "tutorials/": "Tutorials",
    "how-to/": "How-to",
    "explanation/": "Explanation",
    "reference/": "Reference",
    "": "Results",
}  # folders of docs/ in the order of the sidebar; "" is docs/ itself

project = "patchloom"
project_copyright = "the patchloom authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/*.md"]
exclude_patterns = [".*", "runs", "site", "src", "tests"]
myst_heading_anchors = 4
html_theme = "furo"  # with the reader's fonts, so that the site loads nothing from other hosts
html_title = "patchloom"
html_copy_source = False
html_extra_path = ["redirect"]  # index.html, the page that hosts open first

default_role = "py:obj"  # `Name` in a docstring is a link
add_module_names = False
autodoc_default_options = {"members": True, "show-inheritance": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # two classes of one name: the link goes to the first


def public_modules() -> dict[str, Path]:
    """Return the file of every module without a leading underscore, by its dotted name."""
    found = {}
    for path in sorted((ROOT / "src" / "patchloom").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found[".".join(parts)] = path
    return found


def home_of(dotted: str) -> str | None:
    """Return the module that defines ``dotted``, since packages re-export names; None if it does not exist."""
    module, parts = dotted, []
    while module:
        try:
            found = importlib.import_module(module)
            for part in parts:
                found = getattr(found, part)
        except ModuleNotFoundError:
            module, _, part = module.rpartition(".")
            parts.insert(0, part)
        except AttributeError:
            return None
        else:
            verb = inspect.unwrap(found)  # a module of the same name may replace it
            here, name = getattr(verb, "__module__", None), getattr(verb, "__qualname__", None)
            return f"{here}.{name}" if (parts or verb is not found) and here and name else dotted
    return None


def page_of(name: str, modules: dict[str, Path]) -> str:
    """Return the page of one module, with links to its submodules."""
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", ""]
    beneath = {one: one.rpartition(".")[2] for one in modules if one.rpartition(".")[0] == name}
    exported = getattr(importlib.import_module(name), "__all__", ()) if beneath else ()
    if exported:
        lines += ["Exported names:", ""]
        lines += [f"- :py:obj:`{one} <{home_of(f'{name}.{one}')}>`" for one in exported] + [""]
    for full, short in beneath.items():
        about = ast.get_docstring(ast.parse(modules[full].read_text())) or ""
        lines.append(f"- :doc:`{short} <{full}>`: {about.splitlines()[0] if about else ''}")
    contents = [f"   {short} <{full}>" for full, short in beneath.items()]
    return "\n".join([*lines, "", ".. toctree::", "   :hidden:", "", *contents]) + "\n"


def write_pages(app: Sphinx) -> None:
    """Write docs/api/ from the tree."""
    API.mkdir(exist_ok=True)
    modules = public_modules()
    wanted = {API / f"{name}.rst": page_of(name, modules) for name in modules}
    for path in set(API.iterdir()) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add hidden tables of contents for the sidebar; GitHub would show them as code."""
    if page == "README":
        source[0] += contents("", ["docs/README"])
        index = (ROOT / "docs" / "README.md").read_text()
        for folder, caption in KINDS.items():
            if pages := pages_in(folder, index):
                source[0] += contents(caption, pages)
        source[0] += contents("Project", ["benchmarks/README", "CONTRIBUTING", "CHANGELOG"])
        source[0] += contents("Modules", ["patchloom <docs/api/patchloom>"])
    elif page == "benchmarks/README":
        source[0] += contents("", dict.fromkeys(re.findall(r"\[[^\]]*\]\((\w+)\.md\)", source[0])))


def pages_in(folder: str, index: str) -> list[str]:
    """Return the pages of a folder of docs/, in the order of the index's lists; pages that it lacks come last."""
    linked = dict.fromkeys(re.findall(r"^- \[[^\]]*\]\(([\w./-]+)\.md\)", index, re.MULTILINE))
    found = [
        path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted((ROOT / "docs").glob(f"{folder}*.md"))
    ]
    ordered = [page for page in (f"docs/{one}" for one in linked) if page in found]
    return [page for page in dict.fromkeys([*ordered, *found]) if page != "docs/README"]


def contents(caption: str, pages: Iterable[str]) -> str:
    """Return a hidden toctree."""
    head = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join([*head, *pages, "```", ""])


def find_elsewhere(app: Sphinx, env, node, content):
    """Link `Name` in another module if the name is unique; warn of a `patchloom.x.y` that does not exist."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    domain, target = env.get_domain("py"), node["reftarget"]
    if target.startswith("patchloom."):
        home = home_of(target)
        if home is None:
            logging.getLogger(__name__).warning("there is no %s", target, location=node)
        found = {home} & set(domain.objects)
    else:
        found = {name for name in domain.objects if name.endswith(f".{target}")}
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found.pop(), node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above to Sphinx, which calls this one."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_contents)
    app.connect("missing-reference", find_elsewhere)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
