"""Releases of NCCL, torch, Transformer Engine and NVIDIA's driver with known faults that hit a fault-tolerant run;
and the versions that must be equal on all nodes of a run.

The table of faults is from issues and release notes, which each row names. Nothing of it was tried here.
"""

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ft.base.checkout import CHECKOUT

Release = tuple[int, ...]

NCCL, TORCH, TE, DRIVER = "NCCL", "torch", "Transformer Engine", "NVIDIA driver"


@dataclass(frozen=True)
class KnownFault:
    """A fault of some releases.

    Attributes:
        what: NCCL, TORCH, TE or DRIVER.
        first: first release that has the fault.
        end: first release after it without the fault.
        fault: what goes wrong, as the end of a sentence.
        fix: what to do.
        source: address of the issue, release notes or source file that says so.
        off: (environment variable, value) that avoids the fault; None: nothing does.
    """

    what: str
    first: Release
    end: Release
    fault: str
    fix: str
    source: str
    off: tuple[str, str] | None = None


_NCCL_ISSUE, _NVRX = "https://github.com/NVIDIA/nccl/issues", "https://github.com/NVIDIA/nvidia-resiliency-ext"
_TE = "https://github.com/NVIDIA/TransformerEngine/issues"
_SOUND_NCCL = "use NCCL 2.27.3 to 2.27.6, or 2.28.9 and newer"
_RAS = ("NCCL_RAS_ENABLE", "0")

TABLE = (
    KnownFault(
        NCCL,
        (0,),
        (2, 22),
        "aborts of several communicators of a process wait for each other for ever",
        _SOUND_NCCL,
        "https://github.com/pytorch/pytorch/pull/150690",
    ),
    KnownFault(
        NCCL,
        (2, 26),
        (2, 27),
        "non-blocking communicators, which can be aborted, hang at random",
        _SOUND_NCCL,
        "https://github.com/pytorch/pytorch/issues/153960",
    ),
    KnownFault(
        NCCL,
        (2, 28, 3),
        (2, 28, 9),
        "an abort can crash the process",
        _SOUND_NCCL,
        f"{_NVRX}/blob/main/docs/source/release-notes.md",
    ),
    KnownFault(
        NCCL,
        (2, 26, 2),
        (2, 27),
        "its service for diagnosis (RAS) can crash the process while communicators are made",
        "set NCCL_RAS_ENABLE=0, as ft does unless it is set",
        f"{_NCCL_ISSUE}/1669",
        _RAS,
    ),
    KnownFault(
        NCCL,
        (2, 27, 7),
        (2, 28),
        "its service for diagnosis (RAS) can crash the process",
        "set NCCL_RAS_ENABLE=0, as ft does unless it is set",
        f"{_NCCL_ISSUE}/1996",
        _RAS,
    ),
    KnownFault(
        NCCL,
        (2, 29, 7),
        (2, 30, 7),
        "multi-node runs over InfiniBand can hang",
        "set NCCL_PXN_DISABLE=1, or use NCCL 2.30.7",
        "https://docs.nvidia.com/cuda/cuest/troubleshooting/index.html",
        ("NCCL_PXN_DISABLE", "1"),
    ),
    KnownFault(
        NCCL,
        (2, 29, 7),
        (2, 31),
        "its service for diagnosis (RAS) can crash the process, seen with 256 GPUs",
        "set NCCL_RAS_ENABLE=0, as ft does unless it is set",
        f"{_NCCL_ISSUE}/2346",
        _RAS,
    ),
    KnownFault(
        TORCH,
        (2, 8),
        (2, 13),
        "a thread that waits for a launch can ask a communicator for its state after an abort has freed it",
        "use torch 2.13 or newer",
        "https://github.com/pytorch/pytorch/blob/v2.8.0/torch/csrc/distributed/c10d/NCCLUtils.hpp",
    ),
    KnownFault(
        TE,
        (0,),
        (2, 4),
        "kernel launches keep Python's interpreter lock: behind a hung collective they stop heartbeats and aborts, and "
        "the worker is replaced",
        "use Transformer Engine 2.4 or newer",
        f"{_TE}/1763",
    ),
    KnownFault(
        TE,
        (2, 17),
        (2, 18),
        "the set-up of --tp-comm-overlap can crash the process",
        "use Transformer Engine 2.16, or leave --tp-comm-overlap out",
        f"{_TE}/3199",
    ),
    KnownFault(
        DRIVER,
        (0,),
        (570,),
        "it does not say whether a GPU needs a reset, so that a faulty one may get work again",
        "use driver 570 or newer",
        f"{_NVRX}/releases/tag/v0.3.0",
    ),
    KnownFault(
        DRIVER,
        (560,),
        (570,),
        "collectives between the GPUs of a node can hang",
        "use driver 570 or newer, or set NCCL_P2P_DISABLE=1",
        "https://github.com/dmlc/xgboost/issues/11242",
        ("NCCL_P2P_DISABLE", "1"),
    ),
)


def parse(text: str) -> Release | None:
    """Return the numbers at the beginning of a version, such as (2, 13, 0) for "2.13.0+cpu"; None if there are none."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else None


def installed(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, Release]:
    """Return the releases that are installed here, as far as files say it: nothing is imported.

    Args:
        environment: environment variables; NVIDIA's images name their NCCL in NCCL_VERSION.
        root: root of the file tree, normally "/"; the driver's version is in ``sys/module/nvidia/version``.
    """
    said: dict[str, str] = {NCCL: environment.get("NCCL_VERSION", "")}
    packages = {TORCH: ("torch",), TE: ("transformer-engine",), NCCL: ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    for what, names in packages.items():
        for name in names:
            try:
                said[what] = version(name)
            except PackageNotFoundError:
                continue
    driver = root / "sys/module/nvidia/version"
    said[DRIVER] = driver.read_text() if driver.is_file() else ""
    return {what: release for what, text in said.items() if (release := parse(text)) is not None}


def known_faults(releases: Mapping[str, Release], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each known fault of the releases, with what to do and where it is from.

    Args:
        releases: NCCL, TORCH, TE or DRIVER -> the release; without NCCL, nothing is said.
        environment: environment variables; a fault that they avoid is left out.
    """
    return [] if NCCL not in releases else list(_sentences(releases, environment))


def _sentences(releases: Mapping[str, Release], environment: Mapping[str, str]) -> Iterable[str]:
    for row in TABLE:
        release = releases.get(row.what)
        if release is None or not row.first <= release < row.end:
            continue
        if row.off is None or environment.get(row.off[0]) != row.off[1]:
            name = ".".join(map(str, release))
            yield f"with {row.what} {name}, {row.fault}: {row.fix} ({row.source})"


_OURS = ("ft", "megatron/ft_trainer", "megatron/patches")
_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine")


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that is installed, and the digest of this project's code."""
    found = {"python": platform.python_version(), "code of ft and megatron": CODE}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for folder in _OURS:
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


CODE = _digest_of_code()
"""Digest of the sources at the time of import. Workers inherit it from the process that they are forked from."""
