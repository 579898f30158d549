"""The package: our portions of the `megatron` namespace beside megatron-core's, from a checkout and as a wheel."""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import megatron_lm_trees
import pytest
from core_wheels import wheel_of
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """This project's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind where it runs
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info", "__pycache__", ".*_cache"),
    )
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, timeout=600, capture_output=True)
    [wheel] = folder.glob("megatron_ft-*.whl")
    return wheel


def test_megatron_is_a_namespace_of_ours_and_of_megatron_core():
    assert not (ROOT / "megatron/__init__.py").exists()
    import megatron

    assert megatron.__file__ is None
    assert len(list(megatron.__path__)) >= 2


def test_the_wheel_holds_our_portions_and_nothing_of_the_namespace_itself(built, tmp_path):
    names = set(zipfile.ZipFile(built).namelist())
    assert "megatron/__init__.py" not in names
    assert not any(name.startswith(("megatron/core", "tests", "tools", "build")) for name in names)
    for needed in (
        "ft/base/errors.py",
        "ft/show/report.html",
        "pretrain_gpt.py",
        "megatron/patches/cpu.py",
        "megatron/ft_trainer/loop.py",
        "megatron/ft_trainer/data/loader.py",
        "megatron/ft_trainer/checkpointing/save.py",
    ):
        assert needed in names
    used = [sys.executable, "-c", "import megatron.ft_trainer.arguments as a, megatron.core, sys; print(a.__file__)"]
    unpacked = tmp_path / "site"
    zipfile.ZipFile(built).extractall(unpacked)
    done = subprocess.run(
        used,
        cwd=tmp_path,
        env={"PYTHONPATH": str(unpacked), "PATH": "", "PYTHONWARNINGS": "ignore"},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip().startswith(str(unpacked))


@pytest.mark.parametrize("torch", ["2.8.0a0+34c6371d24.nv25.08", "2.9.0a0+5228986c39.nv25.09", "2.12.1"])
def test_pip_leaves_a_containers_torch_and_what_is_built_against_it_alone(torch, built, tmp_path):
    """The distributions are empty. A newer torch is on offer, which pip must not prefer to the container's own."""
    own, offered = tmp_path / "own", tmp_path / "offered"
    container = {"torch": torch, "transformer_engine": "2.7.0+5fb9af0", "apex": "0.1", "flash_attn": "2.7.4.post1"}
    have = [empty_wheel(own, name, version) for name, version in container.items()]
    for requirement in map(Requirement, needs_of(built)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            pin = next((spec.version for spec in requirement.specifier if spec.operator == "=="), "9.9")
            empty_wheel(offered, requirement.name, pin)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=600)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", "--find-links", str(offered)]
    subprocess.run([*install, *map(str, have)], check=True, timeout=600)
    subprocess.run([*install, str(built)], check=True, timeout=600)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, timeout=600, capture_output=True, text=True)
    versions = {each["name"].replace("-", "_"): Version(each["version"]) for each in json.loads(listed.stdout)}
    assert {name: versions[name] for name in container} == {name: Version(v) for name, v in container.items()}
    assert "megatron_core" in versions and "megatron_ft" in versions
    subprocess.run([*pip, "check"], check=True, timeout=600)


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


@pytest.mark.newest
@pytest.mark.skipif(
    Version(importlib.metadata.version("megatron-core")) < Version("0.17"),
    reason="megatron-core's wheels hold a trainer from 0.17 on (Python 3.12)",
)
def test_nvidias_trainer_stays_whole_beside_this_package_and_both_train(request, built, tmp_path):
    core = wheel_of(request, tmp_path, importlib.metadata.version("megatron-core"))
    environment = tmp_path / "venv"
    site = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=600)
    python = str(environment / "bin" / "python")

    def pip(*words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet", *words]
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(command, check=True, timeout=600, cwd=tmp_path, env=outside)

    pip("install", "--no-deps", "--no-index", str(core))
    assert (site / "megatron/training/training.py").exists() and damaged(site, "megatron_core") == []
    pip("install", "--no-deps", "--no-index", str(built))
    assert damaged(site, "megatron_core") == [] == damaged(site, "megatron_ft")
    others = site / "others.pth"  # torch and all else from the environment of the tests, after the two of this one
    others.write_text(sysconfig.get_path("purelib"))
    train_with_both(python, site, tmp_path)
    others.unlink()
    assert damaged(site, "megatron_core") == []
    pip("uninstall", "--yes", "megatron-ft")
    assert damaged(site, "megatron_core") == [] and not (site / "ft/cli.py").exists()
    assert not list((site / "megatron").glob("ft_trainer/*.py"))


def damaged(site: Path, name: str) -> list[str]:
    """Return the files of a distribution that do not have the digest of its RECORD."""
    [record] = site.glob(f"{name}-*.dist-info/RECORD")
    found = []
    for path, digest, _ in csv.reader(record.read_text().splitlines()):
        file = site / path
        given = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()) if file.exists() else b""
        if digest and digest != f"sha256={given.decode().rstrip('=')}":
            found.append(path)
    return found


def train_with_both(python: str, site: Path, folder: Path) -> None:
    """Train two steps with this project's trainer, and two with NVIDIA's, whose scripts a checkout lends."""
    scripts = megatron_lm_trees.tree("0.19").glob("*.py")
    checkout = folder / "Megatron-LM"
    checkout.mkdir()
    for script in scripts:
        shutil.copy(script, checkout)
    (checkout / "megatron").symlink_to(site / "megatron")
    flags = f"{megatron_lm_trees.BASE} --num-layers 1 --train-iters 2 --mock-data --eval-iters 0 --eval-interval 10"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside.update(OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    ours, theirs = (site / "pretrain_gpt.py", "--reference-trainer"), (checkout / "pretrain_gpt.py",)
    for name, words in (("ours", ours), ("theirs", theirs)):
        run = [python, "-m", "ft", "run", "--nproc-per-node", "2", "--run-dir", str(folder / name), *map(str, words)]
        run += [*flags.split(), "--ft-hot-swap"]
        done = subprocess.run(run, cwd=folder, env=outside, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]
