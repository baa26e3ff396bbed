"""Tasks that are not in the list: a class in a file or a module of the user's, or one that only a program has.

Such a task has a name by which it is found again, and by which any change of its code is noticed: the place of the
class, and a digest, as in ``/home/me/half.py:Half#0123456789abcdef`` or ``mypackage.half:Half#0123456789abcdef``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from difflib import get_close_matches
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from patchloom.errors import PatchloomError

if TYPE_CHECKING:
    from patchloom.tasks.task import Task


_PROGRAM = "__main__"  # a program itself, which cannot be imported
_HERE: dict[str, type[Task]] = {}  # what this process has met already, by full name
_TYPED: set[str] = set()  # full names of what was named without a digest: by the user, who wants its code to be run


class Code(NamedTuple):
    """Where a class is.

    Attributes:
        place: an absolute path that ends in .py, or the name of a module.
        cls: the class, "" for the only task of a file.
        digest: 16 hex digits of the file, or of what a program says of the class; "" if it is not known yet.
    """

    place: str
    cls: str
    digest: str = ""

    @classmethod
    def of(cls, name: str) -> Code:
        """From a name, with or without its digest."""
        where, _, digest = name.partition("#")
        place, _, what = where.rpartition(":") if ":" in where else (where, "", "")
        if place.endswith(".py"):
            place = str(Path(place).expanduser().absolute())
        return cls(place, what, digest)

    @property
    def name(self) -> str:
        """With the digest, if it is known."""
        return f"{self.typed}#{self.digest}" if self.digest else self.typed

    @property
    def typed(self) -> str:
        """Without the digest, as a user writes it."""
        return f"{self.place}:{self.cls}"

    @property
    def somewhere(self) -> bool:
        """Whether another process can find it."""
        return self.place != _PROGRAM and "<locals>" not in self.cls

    def file(self) -> Path:
        """The file in which it is. Nothing of it is run."""
        if self.place.endswith(".py"):
            if not Path(self.place).is_file():
                raise PatchloomError(
                    f"there is no file {self.place}: give --task FILE.py:CLASS with the place of the class"
                )
            return Path(self.place)
        try:
            found = find_spec(self.place)
        except (ImportError, ValueError):  # a package on the way is missing, or is none
            found = None
        if found is None or not found.origin or not found.origin.endswith(".py"):
            raise PatchloomError(
                f"the task {self.cls} is in the module {self.place}, which cannot be imported here: put its folder "
                "into PYTHONPATH, or give --task FILE.py:CLASS"
            )
        return Path(found.origin)

    def with_digest(self) -> Code:
        """With the digest of its file as it is now."""
        try:
            return self._replace(digest=_digest(self.file().read_bytes()))
        except OSError as problem:
            raise PatchloomError(f"{self.place} cannot be read: {problem}") from problem


def is_code(name: str) -> bool:
    """Whether a task is named by the place of its class."""
    return ":" in name or name.endswith(".py")


def label(name: str) -> str:
    """What a task is called in sentences and file names: the class alone."""
    return Code.of(name).cls if is_code(name) else name


def same_task(one: str, other: str) -> bool:
    """Whether two names are of the same class, changed or not."""
    return one.partition("#")[0] == other.partition("#")[0]


def refuse_changed(before: str, now: str, run: Path) -> None:
    """Refuse to go on with a run by a class whose code has changed since."""
    if before != now and same_task(before, now):
        raise PatchloomError(
            f"{Code.of(now).typed} has changed since {run} was begun: restore it to go on, or choose another folder "
            f"with --out; --from {run} starts there from its weights"
        )


def is_loaded(name: str) -> bool:
    """Whether to build the task runs no code of a file: this process has it already, or it is one of the list."""
    return not is_code(name) or name in _HERE


def refuse_untyped(name: str, of: object) -> None:
    """Refuse code that a file names, such as a run's configuration, until the user names it, too."""
    code = Code.of(name)
    if not is_loaded(name) and name not in _TYPED and code.somewhere:
        raise PatchloomError(
            f"{of} was trained by {code.cls or 'a task'} of {code.place}, and the code that a run names is run only "
            f"for who types it: give --task {code.typed}"
        )


def allow_code(name: str) -> None:
    """Let the code of a task be run here, because the process that started this one was told to."""
    _TYPED.add(name)


def only_here(name: str) -> bool:
    """Whether no other process can build the task."""
    return is_code(name) and not Code.of(name).somewhere


def full_name(task: Any) -> str:
    """The name, with the digest, of a class or of the place of one."""
    if isinstance(task, str):
        code = Code.of(task)
        if code.name in _HERE:
            return code.name
        if code.digest and code.somewhere and code.name not in _TYPED:
            raise PatchloomError(
                f"{code.name} has a digest, as runs store it, and the code that a run names is run only for who types "
                f"it: leave out #{code.digest}"
            )
        now = code.with_digest() if code.somewhere else code
        if code.digest and code.digest != now.digest:
            raise PatchloomError(
                f"{code.file()} has changed since it was called {code.name}: to use it as it is now, leave out "
                f"#{code.digest}"
            )
        name = now.name if code.cls else _only_task(now).name
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
    except (KeyError, AttributeError, PatchloomError):  # such as a class of a notebook
        code = Code(_PROGRAM, task.__name__, _source_digest(task))
    _HERE[code.name] = task
    return code.name


def load(name: str) -> type[Task]:
    """The class that a name is of. The code of its file is run, unless this process has done so already."""
    name = full_name(name)
    if name not in _HERE:
        code = Code.of(name)
        if not code.somewhere:
            raise PatchloomError(
                f"the task {code.cls} was a class in a program, which no other can import: give it again in Python, as "
                f"in task={code.cls}, or put it into a file and give --task FILE.py:{code.cls}"
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
    return _HERE[name]


def _only_task(code: Code) -> Code:
    found = _tasks_in(_run(code))
    if len(found) != 1:
        there = f"the tasks {', '.join(found)}" if found else "no task"
        raise PatchloomError(f"{code.place} has {there}: give one as FILE.py:CLASS")
    return code._replace(cls=found[0])


def _tasks_in(module: ModuleType) -> list[str]:
    from patchloom.tasks.task import Task

    classes = inspect.getmembers(module, inspect.isclass)
    return [name for name, one in classes if issubclass(one, Task) and one.__module__ == module.__name__]


def _run(code: Code) -> ModuleType:
    """The module, run if this process has not done so."""
    try:
        if not code.place.endswith(".py"):
            return importlib.import_module(code.place)
        name = f"patchloom_{_digest(code.name.partition(':')[0].encode())}_{code.digest}"
        if name in sys.modules:
            return sys.modules[name]
        folder = str(Path(code.place).parent)
        if folder not in sys.path:  # it may import what lies beside it, now or later
            sys.path.append(folder)
        spec = spec_from_file_location(name, code.place)
        assert spec is not None and spec.loader is not None  # of a file in .py
        module = module_from_spec(spec)
        sys.modules[name] = module  # which dataclasses look up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except (Exception, SystemExit) as problem:  # whatever a user's code raises
        line = getattr(problem, "lineno", None) or _line(problem, code.place)
        at = f" in line {line}" if line else ""
        said = " ".join(str(problem).split())
        raise PatchloomError(f"{code.place} cannot be run ({type(problem).__name__}{at}: {said}): mend it") from problem


def fault_of(problem: BaseException) -> PatchloomError | None:
    """What to say of an exception that the code of a user's own task raised; None of any other.

    It is theirs if one of their lines stands in the way to it, also in a process that reads images.
    """
    places = {getattr(sys.modules.get(task.__module__), "__file__", None): task for task in _HERE.values()}
    for file, task in places.items():
        if file is None:
            continue
        line = _line(problem, file)
        if line is None:  # of a reading process nothing but its text comes here
            told = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(problem))
            line = int(told[-1]) if told else None
        if line is not None:
            last = (str(problem).strip().splitlines() or [""])[-1]
            said = last if type(problem).__name__ in last else f"{type(problem).__name__}: {last}"
            return PatchloomError(f"the task {task.__name__} failed in line {line} of {file} ({said}): mend it there")
    return None


def _line(problem: BaseException, file: str) -> int | None:
    """Where in a file a problem arose."""
    found, trace = None, problem.__traceback__
    while trace is not None:
        found = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else found
        trace = trace.tb_next
    return found


def _refuse_unfit(task: Any, name: str) -> None:
    """Refuse what is no task, or one that could not be built from options."""
    from patchloom.tasks.task import Task

    if not (isinstance(task, type) and issubclass(task, Task)):
        raise PatchloomError(
            f"{name} is no pretext task: derive its class from patchloom.tasks.task.Task, as docs/extend.md shows"
        )
    if lacks := sorted(task.__abstractmethods__):
        raise PatchloomError(f"the task {name} does not say {lacks[0]}: write that method, as docs/extend.md shows")
    first, *others = inspect.signature(task).parameters.values()
    if first.name != "encoder":
        raise PatchloomError(f"the first argument of the task {name} is {first.name}: call it encoder")
    for one in others:
        if one.default is one.empty:
            raise PatchloomError(f"the option {one.name} of the task {name} has no default: give it one")
    try:
        get_type_hints(task.__init__)
    except Exception as problem:  # a name that only type checkers import
        raise PatchloomError(f"the types of the options of {name} cannot be read ({problem}): mend them") from problem


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _source_digest(task: type) -> str:
    try:
        return _digest(inspect.getsource(task).encode())
    except (OSError, TypeError):  # of an interactive session
        return ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
