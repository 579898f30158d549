"""Wheels of megatron-core, for tests that read its sources or install them."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest


def newest_wheel(request, tmp_path) -> Path:
    """Return the newest release before 0.20, for Python 3.12."""
    return _fetch(request, tmp_path, "megatron-core>=0.16.1,<0.20", "3.12")


def wheel_of(request, tmp_path, version: str) -> Path:
    """Return the wheel of a release for the Python that runs the tests."""
    return _fetch(request, tmp_path, f"megatron-core=={version}", "{}.{}".format(*sys.version_info))


def _fetch(request, tmp_path, wanted: str, python: str) -> Path:
    """Return a wheel from pytest's cache or the package index. Skip the test if neither has it."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("megatron_core_wheels")) if cache else tmp_path
    systems = [f"manylinux_2_{minor}_{platform.machine()}" for minor in (34, 31, 28, 24, 17)]
    command = [sys.executable, "-m", "pip", "download", wanted, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += ["--retries", "0", "--timeout", "15", "--quiet", "--disable-pip-version-check"]
    command += [word for system in systems for word in ("--platform", system)]
    try:
        reason = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180).stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    found = folder.glob(f"megatron_core-*-cp{python.replace('.', '')}-*.whl")
    wheels = sorted(found, key=lambda file: file.stat().st_mtime)
    if not wheels:
        pytest.skip(f"no wheel of megatron-core: {reason.splitlines()[-1] if reason else 'pip fetched none'}")
    return wheels[-1]
