"""Reads the source code that the checks of this folder analyse: megatron-core's and this project's. Imports neither.

Megatron-core's source is read from the installed package, a wheel or a source archive.
"""

import ast
import importlib.util
import platform
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from ft.base.errors import UserError

_CORE = "megatron/core/"


class CoreSources:
    """The modules of one release of megatron-core.

    Attributes:
        origin: the folder or file that the source was read from.
        version: the version in its `package_info`, for example "0.16.1"; "unknown" if there is none.
    """

    def __init__(self, origin: str, read: Callable[[str], bytes | None], files: Callable[[], Iterable[str]]):
        self.origin, self._read, self._files = origin, read, files
        self._trees: dict[str, ast.Module | None] = {}
        self.version = self._find_version()

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of the module `megatron.core...`, None if there is no such module.

        Raises:
            UserError: the source does not parse.
        """
        if module not in self._trees:
            path = f"{module.replace('.', '/')}/".removeprefix(_CORE)
            source = (self._read(f"{path[:-1]}.py") if path else None) or self._read(f"{path}__init__.py")
            try:
                self._trees[module] = None if source is None else ast.parse(source)
            except (SyntaxError, ValueError) as error:
                problem = f"{self.origin}: {module} does not parse with Python {platform.python_version()}"
                raise UserError(f"{problem}: {error}", "check a wheel with the Python it was made for") from error
        return self._trees[module]

    def modules(self) -> list[str]:
        """Return the names of all modules below ``megatron.core``, sorted."""
        names = (file.removesuffix(".py").removesuffix("__init__").strip("/") for file in self._files())
        return sorted(f"{_CORE}{name}".replace("/", ".") for name in names if name)

    def is_package(self, module: str) -> bool:
        return self.tree(f"{module}.__init__") is not None

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) of the version.

        Raises:
            UserError: the sources do not contain the version.
        """
        numbers = self.version.split(".")
        if len(numbers) < 3:
            problem = f"{self.origin} does not say which release it is: megatron/core/package_info.py has no version"
            raise UserError(problem, "check a whole megatron-core")
        return int(numbers[0]), int(numbers[1])

    def _find_version(self) -> str:
        tree = self.tree("megatron.core.package_info")
        parts = {}
        for node in tree.body if tree else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                parts |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        numbers = [parts.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
        if None in numbers:
            return "unknown"
        return ".".join(map(str, numbers)) + (parts.get("PRE_RELEASE") or "")


class OwnSources:
    """The modules of this project whose source contains the word "megatron".

    Args:
        root: the folder that holds the packages ``megatron`` and ``ft``; None: the one that this file is in. If it is a
            repository (has a ``setup.py``), ``examples`` and ``tools`` are included.

    Attributes:
        files: {dotted name of a module: path of its file}, in the order of paths.
    """

    def __init__(self, root: Path | None = None):
        self._root = root = root or Path(__file__).resolve().parents[2]
        folders = ["ft", "megatron/patches", "megatron/ft_trainer"]
        if (root / "setup.py").is_file():
            folders += ["examples", "tools"]
        files = [file for folder in folders for file in (root / folder).rglob("*.py")]
        files += [file for file in (root / "pretrain_gpt.py",) if file.is_file()]
        self.files = {self._name(file): file for file in sorted(files) if b"megatron" in file.read_bytes()}

    def tree(self, module: str) -> ast.Module:
        """Return the syntax tree of ``module``, a new tree for every call."""
        return ast.parse(self.files[module].read_bytes())

    def is_package(self, module: str) -> bool:
        return self.files[module].name == "__init__.py"

    def shown(self, file: Path) -> str:
        """Return the path of a file relative to the root, for messages."""
        return str(file.relative_to(self._root))

    def _name(self, file: Path) -> str:
        parts = file.relative_to(self._root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def installed_core() -> CoreSources:
    """Return the megatron-core that `import megatron.core` would import.

    Raises:
        UserError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("megatron-core is not installed", "pip install megatron-core==0.19.2 (0.16.1 for Python 3.11)")
    folder = Path(spec.submodule_search_locations[0])

    def read(path: str) -> bytes | None:
        file = folder / path
        return file.read_bytes() if file.is_file() else None

    return CoreSources(str(folder), read, lambda: (str(file.relative_to(folder)) for file in folder.rglob("*.py")))


def archived_core(file: Path) -> CoreSources:
    """Return the megatron-core inside a wheel, zip or tar archive.

    Raises:
        UserError: the file is not such an archive, or contains no megatron-core.
    """
    fix = "give a megatron-core wheel, e.g. what `pip download --no-deps megatron-core` fetches"
    if not file.is_file():
        raise UserError(f"{file}: no such file", fix)
    try:
        if zipfile.is_zipfile(file):
            contents = _zip_contents(file)
        elif tarfile.is_tarfile(file):
            contents = _tar_contents(file)
        else:
            raise UserError(f"{file} is neither a wheel nor a source archive", fix)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{file} cannot be read: {error}", fix) from error
    if not contents:
        raise UserError(f"{file}: there is no megatron/core inside", fix)
    return CoreSources(str(file), contents.get, lambda: contents)


def _zip_contents(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {path: archive.read(name) for name in archive.namelist() if (path := _inside_core(name))}


def _tar_contents(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        members = [(path, member) for member in archive if member.isfile() and (path := _inside_core(member.name))]
        return {path: archive.extractfile(member).read() for path, member in members}


def _inside_core(name: str) -> str | None:
    """Return the path below megatron/core of a Python file, at the top of the archive or in its one top folder."""
    for start in (name, name.partition("/")[2]):
        if start.startswith(_CORE) and start.endswith(".py"):
            return start.removeprefix(_CORE)
    return None
