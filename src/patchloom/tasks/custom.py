"""Custom tasks: classes that are not in ``TASKS`` but in a user's file, module or running program.

The name of such a task lets a run find it again and notice any change of its code: the place of the class and a
digest, as in ``/home/me/half.py:Half#0123456789abcdef`` or ``mypackage.half:Half#0123456789abcdef``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from patchloom.errors import PatchloomError
from patchloom.system.files import read_bytes

if TYPE_CHECKING:
    from patchloom.tasks.task import Task


_PROGRAM = "__main__"  # the running program, which cannot be imported
_HERE: dict[str, type[Task]] = {}  # classes loaded in this process, by full name
_TYPED: set[str] = set()  # full names that the user typed without a digest, which permits to run their code


class Code(NamedTuple):
    """Place of a class.

    Attributes:
        place: an absolute path that ends in .py, or the name of a module.
        cls: the class, "" for the only task of a file.
        digest: 16 hex digits of the SHA-256 of the file, or of the source of a class in a program; "" if unknown.
    """

    place: str
    cls: str
    digest: str = ""

    @classmethod
    def of(cls, name: str) -> Code:
        """Parse a name, with or without its digest."""
        where, _, digest = name.partition("#")
        place, _, what = where.rpartition(":") if ":" in where else (where, "", "")
        if place.endswith(".py"):
            place = str(Path(place).expanduser().absolute())
        return cls(place, what, digest)

    @property
    def name(self) -> str:
        """Name with the digest, if it is known."""
        return f"{self.typed}#{self.digest}" if self.digest else self.typed

    @property
    def typed(self) -> str:
        """Name without the digest, as a user types it."""
        return f"{self.place}:{self.cls}"

    @property
    def somewhere(self) -> bool:
        """Whether another process can import the class."""
        return self.place != _PROGRAM and "<locals>" not in self.cls

    def file(self) -> Path:
        """Find the file of the class without running it."""
        if self.place.endswith(".py"):
            if not Path(self.place).is_file():
                raise PatchloomError(
                    f"there is no file {self.place}: give --task FILE.py:CLASS with the place of the class"
                )
            return Path(self.place)
        try:
            found = find_spec(self.place)
        except (ImportError, ValueError):  # a parent package is missing, or is no package
            found = None
        if found is None or not found.origin or not found.origin.endswith(".py"):
            raise PatchloomError(
                f"the task {self.cls} is in the module {self.place}, which cannot be imported here: put its folder "
                "into PYTHONPATH, or give --task FILE.py:CLASS"
            )
        return Path(found.origin)

    def with_digest(self) -> Code:
        """Add the digest of the file's present contents."""
        try:
            return self._replace(digest=_digest(read_bytes(self.file(), follow=True)))
        except OSError as problem:
            raise PatchloomError(f"{self.place} cannot be read: {problem}") from problem


def is_code(name: str) -> bool:
    """Return whether a task is named by the place of its class."""
    return ":" in name or name.endswith(".py")


def label(name: str) -> str:
    """Return the short name of a task for messages and file names: the class alone."""
    return Code.of(name).cls if is_code(name) else name


def same_task(one: str, other: str) -> bool:
    """Return whether two names are of the same class, in the same version or not."""
    return one.partition("#")[0] == other.partition("#")[0]


def refuse_changed(before: str, now: str, run: Path) -> None:
    """Raise an error if the class of a run's task has changed since the run began."""
    if before != now and same_task(before, now):
        raise PatchloomError(
            f"{Code.of(now).typed} has changed since {run} was begun: restore it to go on, or choose another folder "
            f"with --out; --from {run} starts there from its weights"
        )


def is_loaded(name: str) -> bool:
    """Return whether the task can be built without running code of a file: it is loaded already, or in ``TASKS``."""
    return not is_code(name) or name in _HERE


def refuse_untyped(name: str, of: object) -> None:
    """Raise an error for code that only a file names, such as a run's configuration, until the user names it, too."""
    code = Code.of(name)
    if not is_loaded(name) and name not in _TYPED and code.somewhere:
        raise PatchloomError(
            f"{of} was trained by {code.cls or 'a task'} of {code.place}, and code that a run names is not run "
            f"unless you name it: give --task {code.typed}"
        )


def only_here(name: str) -> bool:
    """Return whether the task cannot be built in another process."""
    return is_code(name) and not Code.of(name).somewhere


def full_name(task: Any) -> str:
    """Return the name, with digest, of a class or of the place of a class."""
    if isinstance(task, str):
        code = Code.of(task)
        if code.name in _HERE:
            return code.name
        if code.digest and code.somewhere and code.name not in _TYPED:
            raise PatchloomError(
                f"{code.name} has a digest, as stored by runs, and code that a run names is not run unless you name "
                f"it: leave out #{code.digest}"
            )
        now = code.with_digest() if code.somewhere else code
        if code.digest and code.digest != now.digest:
            raise PatchloomError(
                f"{code.file()} has changed since it was called {code.name}: to use the present version, leave out "
                f"#{code.digest}"
            )
        if not code.cls:
            found = _tasks_in(_run(now))
            if len(found) != 1:
                there = f"the tasks {', '.join(found)}" if found else "no task"
                raise PatchloomError(f"{now.place} has {there}: give one as FILE.py:CLASS")
            now = now._replace(cls=found[0])
        name = now.name
        _TYPED.add(name)
        return name
    known = next((name for name, cls in _HERE.items() if cls is task), None)
    if known is not None:
        return known
    _refuse_unfit(task, task.__name__)
    code = Code(task.__module__, task.__qualname__)
    try:
        if not code.somewhere or _attribute(sys.modules[code.place], code.cls) is not task:
            raise AttributeError
        code = code.with_digest()
    except (KeyError, AttributeError, PatchloomError):  # for example a class in a notebook
        code = Code(_PROGRAM, task.__name__)
        with suppress(OSError, TypeError):  # in an interactive session
            code = code._replace(digest=_digest(inspect.getsource(task).encode()))
    _HERE[code.name] = task
    return code.name


def load(name: str) -> type[Task]:
    """Return the class of a name. Runs the code of its file, unless this process has done so already."""
    name = full_name(name)
    if name not in _HERE:
        code = Code.of(name)
        if not code.somewhere:
            raise PatchloomError(
                f"the task {code.cls} was a class in a program, which no other program can import: give it again in "
                f"Python, as in task={code.cls}, or put it into a file and give --task FILE.py:{code.cls}"
            )
        module = _run(code)
        try:
            task = _attribute(module, code.cls)
        except AttributeError:
            near = get_close_matches(code.cls, _tasks_in(module), n=1)
            hint = f"did you mean {near[0]}?" if near else f"its tasks are {', '.join(_tasks_in(module)) or 'none'}"
            raise PatchloomError(f"{code.place} has no class {code.cls}; {hint}") from None
        _refuse_unfit(task, code.cls)
        _HERE[name] = task
    from patchloom.tasks.bare import as_task, is_bare_loss  # imports torch

    found = _HERE[name]
    return as_task(found) if is_bare_loss(found) else found


def _tasks_in(module: ModuleType) -> list[str]:
    from patchloom.tasks.task import Task

    classes = inspect.getmembers(module, inspect.isclass)
    return [name for name, one in classes if issubclass(one, Task) and one.__module__ == module.__name__]


def _run(code: Code) -> ModuleType:
    """Return the module; run it unless this process has done so already."""
    try:
        if not code.place.endswith(".py"):
            return importlib.import_module(code.place)
        name = f"patchloom_{_digest(code.name.partition(':')[0].encode())}_{code.digest}"
        if name in sys.modules:
            return sys.modules[name]
        folder = str(Path(code.place).parent)
        if folder not in sys.path:  # the file may import modules beside it, now or later
            sys.path.append(folder)
        spec = spec_from_file_location(name, code.place)
        assert spec is not None and spec.loader is not None  # the file ends in .py
        module = module_from_spec(spec)
        sys.modules[name] = module  # for dataclasses, which look it up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except (Exception, SystemExit) as problem:  # a user's code may raise anything
        line = getattr(problem, "lineno", None) or _line(problem, code.place)
        at = f" in line {line}" if line else ""
        said = " ".join(str(problem).split())
        raise PatchloomError(f"{code.place} cannot be run ({type(problem).__name__}{at}: {said}): fix it") from problem


def fault_of(problem: BaseException) -> PatchloomError | None:
    """Return the error message for an exception that a custom task's code raised, else None.

    The exception is the task's if its traceback contains a line of the task's file, also in a data-loading process.
    """
    places = {getattr(sys.modules.get(task.__module__), "__file__", None): task for task in _HERE.values()}
    for file, task in places.items():
        if file is None:
            continue
        line = _line(problem, file)
        if line is None:  # of a data-loading process only the text of its traceback arrives
            lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(problem))
            line = int(lines[-1]) if lines else None
        if line is not None:
            last = (str(problem).strip().splitlines() or [""])[-1]
            said = last if type(problem).__name__ in last else f"{type(problem).__name__}: {last}"
            return PatchloomError(f"the task {task.__name__} failed in line {line} of {file} ({said}): fix it there")
    return None


def _line(problem: BaseException, file: str) -> int | None:
    """Return the last line of ``file`` in the traceback of an exception."""
    found, trace = None, problem.__traceback__
    while trace is not None:
        found = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else found
        trace = trace.tb_next
    return found


def _refuse_unfit(task: Any, name: str) -> None:
    """Raise an error for an object that is not a task, or cannot be built from options."""
    from patchloom.tasks.bare import is_bare_loss
    from patchloom.tasks.task import Task

    bare = is_bare_loss(task)
    if not bare and not (isinstance(task, type) and issubclass(task, Task)):
        raise PatchloomError(
            f"{name} is not a pretext task: derive its class from patchloom.tasks.task.Task, as "
            "docs/how-to/extend.md shows"
        )
    if not bare and (lacks := sorted(task.__abstractmethods__)):
        raise PatchloomError(f"the task {name} has no method {lacks[0]}: write it, as docs/how-to/extend.md shows")
    first, *others = inspect.signature(task).parameters.values()
    if first.name != "encoder":
        raise PatchloomError(f"the first argument of the task {name} is {first.name}: rename it to encoder")
    for one in others:
        if one.default is one.empty:
            raise PatchloomError(f"the option {one.name} of the task {name} has no default: give it one")
    try:
        get_type_hints(task.__init__)
    except Exception as problem:  # for example a name that is imported for type checkers only
        raise PatchloomError(f"the types of the options of {name} cannot be read ({problem}): fix them") from problem


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
