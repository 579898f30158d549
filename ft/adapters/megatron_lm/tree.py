"""Recognises a Megatron-LM checkout, and puts its modules first on the path of a process that runs it.

The installed megatron-core counts as a checkout if it carries the trainer, for one script: :data:`SCRIPT`.
"""

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ft.base.checkout import CHECKOUT
from ft.base.errors import UserError

_TRAINER = Path("megatron", "training", "training.py")
_RELEASE = Path("megatron", "core", "package_info.py")
SCRIPT = Path(__file__).parent / "wheel" / "pretrain_gpt.py"
"""Script that trains a GPT with the trainer in the installed megatron-core."""


@dataclass(frozen=True)
class CheckoutTree:
    """One checkout.

    Attributes:
        release: (major, minor, patch) of the megatron-core in it.
    """

    root: Path
    release: tuple[int, int, int]

    @property
    def version(self) -> str:
        """Return the release as text, such as "0.16.1"."""
        return ".".join(map(str, self.release))


def root_of(script: str) -> Path | None:
    """Return the folder of the checkout that ``script`` is part of; None if there is no trainer beside the script.

    For :data:`SCRIPT` this is the folder in which megatron-core is installed, if it carries the trainer.
    """
    folder = Path(script).absolute().parent
    if folder == SCRIPT.parent:
        return installed()
    return folder if (folder / _TRAINER).is_file() and folder.resolve() != CHECKOUT.resolve() else None


def installed() -> Path | None:
    """Return the folder in which a megatron-core with the trainer is installed; None if there is none."""
    spec = find_spec("megatron")
    folders = [] if spec is None else [Path(folder).parent for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if (folder / _TRAINER).is_file()), None)


def read(root: Path) -> CheckoutTree:
    """Return the checkout in the folder ``root``.

    Raises:
        UserError: the folder has no megatron-core whose release can be read.
    """
    try:
        body = ast.parse((root / _RELEASE).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        problem = f"{root} has a trainer of Megatron-LM, but no megatron-core beside it ({_RELEASE})"
        raise UserError(problem, "give the script of a whole checkout of Megatron-LM") from error
    found = {
        target.id: node.value.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    numbers = [found.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(isinstance(number, int) for number in numbers):
        raise UserError(f"{root / _RELEASE} does not say which release it is", "give a whole checkout of Megatron-LM")
    return CheckoutTree(root, tuple(numbers))


def others_on_path(root: Path, path: Sequence[str]) -> list[Path]:
    """Return the folders of ``path`` that contain another trainer of Megatron-LM than the one in ``root``.

    Python might mix the modules of the two. Installed packages (``site-packages``) are ignored, because the checkout
    precedes them on the path.
    """
    folders = {Path(entry or ".").absolute().resolve() for entry in path} - {root.resolve(), CHECKOUT.resolve()}
    return sorted(
        folder
        for folder in folders
        if folder.name not in ("site-packages", "dist-packages")
        and ((folder / _TRAINER).is_file() or (folder / "megatron" / "__init__.py").is_file())
    )


def enter(root: Path) -> None:
    """Make this process import ``megatron`` from the checkout in ``root``, and ``megatron.patches`` from this project.

    Without an ``__init__.py``, ``megatron`` is a namespace package, which joins the folders of all entries of the path,
    the checkout's first. If the checkout's ``megatron`` has an ``__init__.py``, this project's folder is appended to
    its ``__path__``. An installed megatron-core is on the path already.
    """
    if root != installed():
        sys.path[:] = [str(root), *(entry for entry in sys.path if entry != str(root))]
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    import megatron

    own = str(CHECKOUT / "megatron")
    if own not in list(megatron.__path__):
        megatron.__path__.append(own)


def module(name: str) -> ModuleType:
    """Return the module ``megatron.training.NAME`` of the checkout that this process has entered.

    There is none before that, so the modules of this package cannot import it.
    """
    return import_module(f"megatron.training.{name}")


NVIDIA, REFERENCE = "--nvidia-trainer", "--reference-trainer"
METRICS = "--metrics-file"
"""Flag that both trainers of ``pretrain_gpt.py`` have, and that NVIDIA's parser does not know."""
HELP = f"""
which trainer:
  {NVIDIA}      NVIDIA's, in the installed megatron-core (default if it carries one); has all flags of Megatron-LM
  {REFERENCE}   the reference trainer, megatron/ft_trainer (default otherwise)
"""
SINCE = (0, 19)
"""(major, minor) of the oldest megatron-core whose trainer :mod:`ft.adapters.megatron_lm.gpt` was run with."""

OF_REFERENCE = (
    *("--keep-last", "--no-exit-signal-handler", "--no-dist-ckpt-optim-fully-reshardable"),
    "--disable-gradient-reduce-div-fusion",
)
"""Flags that the reference trainer has and NVIDIA's has not."""


def choose(flags: Sequence[str], release: tuple[int, ...] | None) -> tuple[bool, list[str]]:
    """Return (whether NVIDIA's trainer runs; the flags of the trainer that runs).

    It is NVIDIA's if the installed megatron-core carries one that the script knows, unless the reference trainer is
    asked for.

    Args:
        release: (major, minor, patch) of the installed megatron-core, if it carries the trainer; None: it does not.

    Raises:
        UserError: both trainers are asked for; NVIDIA's, and it is not there; or NVIDIA's runs, and a flag is one that
            only the reference trainer has.
    """
    if NVIDIA in flags and REFERENCE in flags:
        raise UserError(f"{NVIDIA} and {REFERENCE} contradict each other", "give one of them")
    is_there = release is not None and release[:2] >= SINCE
    if NVIDIA in flags and not is_there:
        since = ".".join(map(str, SINCE))
        found = "the installed megatron-core carries no trainer"
        if release is not None:
            found = f"the trainer in megatron-core {'.'.join(map(str, release))} takes its model in another way"
        fix = f"install megatron-core {since} or newer (Python 3.12), give the script of a checkout, or drop the flag"
        raise UserError(f"{NVIDIA} cannot be used: {found}", fix)
    if REFERENCE in flags or not is_there:
        return False, list(flags)
    fix = f"add {REFERENCE}, which runs that trainer, or drop the flag"
    wrong = [name for name in OF_REFERENCE if any(text.partition("=")[0] == name for text in flags)]
    if wrong:
        raise UserError.of(
            [(f"{name} is a flag of the reference trainer, and NVIDIA's trainer runs", fix) for name in wrong]
        )
    return True, [flag for flag in flags if flag != NVIDIA]


def installed_release() -> tuple[int, ...] | None:
    """Return (major, minor, patch) of the installed megatron-core, if it carries the trainer; None: it does not.

    Raises:
        UserError: there is a trainer, and no megatron-core beside it.
    """
    root = installed()
    return None if root is None else read(root).release


def announcement(release: tuple[int, ...] | None) -> str:
    """Return the first line of a run: NVIDIA's trainer in megatron-core ``release``; None: the reference trainer."""
    if release is None:
        return "trainer: the reference trainer, megatron.ft_trainer"
    return f"trainer: NVIDIA's, megatron.training in megatron-core {'.'.join(map(str, release))}"
