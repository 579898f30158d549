"""What our sources call in megatron-core and it does not take is found in the sources, without importing either."""

import textwrap

import pytest

from ft.base.errors import UserError
from megatron.patches.calls import check_calls
from megatron.patches.sources import CoreSources, OwnSources

CORE = {
    "package_info.py": "MAJOR, MINOR, PATCH = 0, 0, 0\nMAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = ''",
    "__init__.py": "from megatron.core import utils",
    "utils.py": """
        def batch(batch, is_hybrid_cp, cp_group=None): ...
        def many(first, /, second, *rest, last, **others): ...
        def plain(a, b=1): ...
        other = plain
        if CUDA:
            def either(a): ...
        else:
            def either(a, b): ...
        try:
            from apex import fused
        except ImportError:
            fused = None
        _CACHE = None
        def fill():
            global LATER
            LATER = 1
    """,
    "things/__init__.py": """
        from .plain import *
        from .config import Config as TheConfig
        from ..utils import batch as again
    """,
    "things/plain.py": """
        import enum, torch
        class Base:
            def __init__(self, size): ...
            def grow(self, by): ...
            @staticmethod
            def free(x): ...
            @classmethod
            def make(cls, x): ...
        class Heir(Base):
            pass
        class Module(torch.nn.Module):
            pass
        class Kind(enum.Enum):
            one = 1
    """,
    "things/config.py": """
        from dataclasses import dataclass, field
        from typing import ClassVar
        @dataclass
        class Parent:
            width: int
            depth: int = 2
            shared: ClassVar[int] = 3
        @dataclass(kw_only=True)
        class Config(Parent):
            heads: int
            made: list = field(default_factory=list)
            later: int = field(init=False)
    """,
}


def core_of(files) -> CoreSources:
    def read(path: str) -> bytes | None:
        return textwrap.dedent(files[path]).encode() if path in files else None

    return CoreSources("planted", read, lambda: files)


def misfits(tmp_path, source: str, files=CORE) -> list[str]:
    folder = tmp_path / "megatron" / "ft_trainer"
    folder.mkdir(parents=True)
    (folder / "planted.py").write_text(textwrap.dedent(source))
    found = check_calls(OwnSources(tmp_path), core_of(files)).misfits
    assert {misfit.file for misfit in found} <= {"megatron/ft_trainer/planted.py"}
    return [f"{misfit.line}: {misfit.problem}" for misfit in found]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("utils.batch(1)", "lacks 'is_hybrid_cp'"),
        ("utils.batch(1, True)", None),
        ("utils.batch(1, True, cp_group=2)", None),
        ("utils.batch(1, True, group=2)", "takes no 'group'"),
        ("utils.batch(1, True, 2, 3)", "takes 3 positional arguments, but gets 4"),
        ("utils.batch(1, True, batch=2)", "is given 'batch' twice"),
        ("utils.batch(*given)", None),
        ("utils.batch(1, **given)", None),
        ("utils.batch(*given, group=2)", "takes no 'group'"),
        ("utils.many(1, 2, 3, 4, last=5, more=6)", None),
        ("utils.many(1, 2, 3)", "lacks 'last'"),
        ("utils.other(1, 2, 3)", "takes 2 positional arguments, but gets 3"),
        ("utils.either(1)", None),
        ("utils.either(1, 2, 3)", "takes 1 positional arguments, but gets 3"),
        ("utils.fused(1, 2, 3)", None),
        ("utils.gone(1)", "no such name"),
        ("utils.LATER", None),
        ("functools.partial(utils.batch, 1)", None),
        ("functools.partial(utils.batch, group=1)", "takes no 'group'"),
        ("again(1)", "lacks 'is_hybrid_cp'"),
        ("things.Base()", "lacks 'size'"),
        ("things.Heir(1, 2)", "takes 1 positional arguments, but gets 2"),
        ("things.Module(1, 2, 3)", None),
        ("things.Base.free()", "lacks 'x'"),
        ("things.Base.make()", "lacks 'x'"),
        ("things.Base.grow(given)", "lacks 'by'"),
        ("things.Heir.shrink", "no such name"),
        ("things.Kind.one", None),
        ("things.Kind.two", "no such name"),
        ("TheConfig(1, heads=2)", None),
        ("TheConfig(1, 2, heads=3, made=[])", None),
        ("TheConfig(heads=2)", "lacks 'width'"),
        ("TheConfig(1, 2, 3)", "takes 2 positional arguments, but gets 3"),
        ("TheConfig(1, heads=2, later=3)", "takes no 'later'"),
        ("TheConfig(1, heads=2, shared=3)", "takes no 'shared'"),
        ("megatron.core.utils.batch(1)", "lacks 'is_hybrid_cp'"),
        ("[utils.batch(1) for utils in given]", None),
        ("(utils := given) and utils.batch(1)", None),
        ("with given as utils: utils.batch(1)", None),
        ("for utils in given: utils.batch(1)", None),
        ("match given:\n  case [utils]: utils.batch(1)", None),
        ("(lambda utils: utils.batch(1))(given)", None),
    ],
)
def test_a_call_is_bound_to_what_core_defines(tmp_path, call, problem):
    imports = "import functools, megatron.core; from megatron.core import utils, things; "
    imports += "from megatron.core.things import TheConfig, again"
    call = "def function(given):\n" + textwrap.indent(call, "    ")
    assert misfits(tmp_path, f"{imports}\n{call}\n") == ([f"3: {problem}"] if problem else [])


def test_classes_of_ours_and_objects_of_core_are_followed(tmp_path):
    source = """
        from megatron.core.things import Base, Heir
        class Ours(Heir):
            def __init__(self):
                super().__init__()
            def grow(self, by):
                super().grow(by, 2)
        class Plain(Heir): ...
        Plain()
        def use(base: Base, other: Heir | None, utils):
            base.grow()
            other.grow(1, 2)
            utils.batch(1)
            made = Heir(1)
            made.grow(by=1, to=2)
    """
    assert misfits(tmp_path, source) == [
        "5: lacks 'size'",
        "7: takes 1 positional arguments, but gets 2",
        "9: lacks 'size'",
        "11: lacks 'by'",
        "12: takes 1 positional arguments, but gets 2",
        "15: takes no 'to'",
    ]


def test_an_import_of_what_is_gone_is_named_unless_the_code_expects_it(tmp_path):
    source = """
        import megatron.core.absent
        from megatron.core.utils import plain, gone
        from megatron.core import things, missing
        try:
            from megatron.core.utils import older
        except ImportError:
            older = None
        try:
            found = things.older
        except AttributeError:
            found = None
        def inside():
            from megatron.core.gone import anything
            return older(1), anything(2)
    """
    assert misfits(tmp_path, source) == [
        "2: no such module",
        "3: no such name",
        "4: no such name",
        "14: no such name",
    ]


RELEASES = """
    from megatron.patches import releases
    from megatron.patches.releases import CORE as RELEASE
    from megatron.core import utils
    def early(batch):
        if RELEASE >= (0, 18):
            return utils.batch(batch, False)
        return utils.batch(batch)
    def other(batch):
        if not (0, 17) <= releases.CORE < (0, 19):
            utils.batch(batch, 1, 2, 3)
        elif batch:
            utils.batch(batch) if RELEASE < (0, 18) else utils.batch(batch, True)
        return RELEASE < (0, 18) and utils.batch(batch)
    def another(batch, CORE):
        if CORE < (0, 18):
            return utils.batch(batch)
"""


@pytest.mark.parametrize(
    ("minor", "parameters", "found"),
    [
        (16, "batch, cp_group=None", ["11: takes 2 positional arguments, but gets 4"]),
        (17, "batch, cp_group=None", []),
        (18, "batch, is_hybrid_cp", ["17: lacks 'is_hybrid_cp'"]),
        (19, "batch, is_hybrid_cp", ["11: takes 2 positional arguments, but gets 4", "17: lacks 'is_hybrid_cp'"]),
    ],
)
def test_a_branch_on_the_release_is_looked_at_for_that_release_only(tmp_path, minor, parameters, found):
    package_info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = 'rc1'"
    utils = f"def batch({parameters}): ..."
    assert misfits(tmp_path, RELEASES, {"package_info.py": package_info, "utils.py": utils}) == found


def test_a_core_that_does_not_say_its_release_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not say which release"):
        misfits(tmp_path, "", {"utils.py": CORE["utils.py"]})
