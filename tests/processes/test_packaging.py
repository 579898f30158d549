"""The package: our portions of the `megatron` namespace beside megatron-core's, from a checkout and as a wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_megatron_is_a_namespace_of_ours_and_of_megatron_core():
    assert not (ROOT / "megatron/__init__.py").exists()
    import megatron

    assert megatron.__file__ is None
    assert len(list(megatron.__path__)) >= 2


def test_the_wheel_holds_our_portions_and_nothing_of_the_namespace_itself(tmp_path):
    source = tmp_path / "source"  # a build leaves folders behind where it runs
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, timeout=120, capture_output=True)
    [wheel] = tmp_path.glob("megatron_ft-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "megatron/__init__.py" not in names
    assert not any(name.startswith(("megatron/core", "tests", "tools", "build")) for name in names)
    for needed in (
        "ft/base/errors.py",
        "pretrain_gpt.py",
        "megatron/patches/cpu.py",
        "megatron/training/loop.py",
        "megatron/training/arguments/megatron_lm_flags.txt",
        "megatron/training/data/loader.py",
        "megatron/training/checkpointing/save.py",
    ):
        assert needed in names
    used = [sys.executable, "-c", "import megatron.training.arguments as a, megatron.core, sys; print(a.__file__)"]
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    done = subprocess.run(
        used,
        cwd=tmp_path,
        env={"PYTHONPATH": str(unpacked), "PATH": "", "PYTHONWARNINGS": "ignore"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().startswith(str(unpacked))
