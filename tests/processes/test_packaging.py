"""The package: our portions of the `megatron` namespace beside megatron-core's, from a checkout and as a wheel."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel in ``folder``, and return its path."""
    source = folder / "source"  # a build leaves folders behind where it runs
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, timeout=120, capture_output=True)
    [wheel] = folder.glob("megatron_ft-*.whl")
    return wheel


def test_megatron_is_a_namespace_of_ours_and_of_megatron_core():
    assert not (ROOT / "megatron/__init__.py").exists()
    import megatron

    assert megatron.__file__ is None
    assert len(list(megatron.__path__)) >= 2


def test_the_wheel_holds_our_portions_and_nothing_of_the_namespace_itself(tmp_path):
    wheel = build_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "megatron/__init__.py" not in names
    assert not any(name.startswith(("megatron/core", "tests", "tools", "build")) for name in names)
    for needed in (
        "ft/base/errors.py",
        "pretrain_gpt.py",
        "megatron/patches/cpu.py",
        "megatron/ft_trainer/loop.py",
        "megatron/ft_trainer/arguments/megatron_lm_flags.txt",
        "megatron/ft_trainer/data/loader.py",
        "megatron/ft_trainer/checkpointing/save.py",
    ):
        assert needed in names
    used = [sys.executable, "-c", "import megatron.ft_trainer.arguments as a, megatron.core, sys; print(a.__file__)"]
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


@pytest.mark.parametrize("torch", ["2.8.0a0+34c6371d24.nv25.08", "2.9.0a0+5228986c39.nv25.09", "2.12.1"])
def test_pip_leaves_a_containers_torch_and_what_is_built_against_it_alone(torch, tmp_path):
    """The distributions are empty. A newer torch is on offer, which pip must not prefer to the container's own."""
    own, offered = tmp_path / "own", tmp_path / "offered"
    container = {"torch": torch, "transformer_engine": "2.7.0+5fb9af0", "apex": "0.1", "flash_attn": "2.7.4.post1"}
    have = [empty_wheel(own, name, version) for name, version in container.items()]
    wheel = build_wheel(tmp_path)
    for requirement in map(Requirement, needs_of(wheel)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            pin = next((spec.version for spec in requirement.specifier if spec.operator == "=="), "9.9")
            empty_wheel(offered, requirement.name, pin)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", "--find-links", str(offered)]
    subprocess.run([*install, *map(str, have)], check=True, timeout=120)
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, timeout=120, capture_output=True, text=True)
    versions = {each["name"].replace("-", "_"): Version(each["version"]) for each in json.loads(listed.stdout)}
    assert {name: versions[name] for name in container} == {name: Version(v) for name, v in container.items()}
    assert "megatron_core" in versions and "megatron_ft" in versions
    subprocess.run([*pip, "check"], check=True, timeout=120)


def needs_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist: ")]


def empty_wheel(folder: Path, name: str, version: str) -> Path:
    """Write a wheel of a distribution without files, and return its path."""
    folder.mkdir(exist_ok=True)
    name = name.replace("-", "_")
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
