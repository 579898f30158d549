"""The manifest fits the cores we support, misfits are refused by name, and the command says so."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
from core_wheels import newest_wheel

from ft.base.errors import UserError
from megatron.patches import Platform, choose_platform, registry
from megatron.patches.__main__ import main as patches_command
from megatron.patches.check import CHANGED, FITS, MISSING, check, refusal
from megatron.patches.manifest import ALWAYS, ELSEWHERE, EVERY_FUNCTION, MANIFEST, ON_CPU, SUPPORTED_CORE
from megatron.patches.replace import replaced
from megatron.patches.sources import archived_core, installed_core

CORE_PATCHES = [patch for patch in MANIFEST if patch.kind == "core"]


# ------------------------------------------------------------------------------------------ the manifest


@pytest.mark.newest
def test_the_installed_core_fits():
    findings = check([*MANIFEST, *ELSEWHERE], installed_core(), with_torch=True)
    assert [f for f in findings if f.status != FITS and f.patch.kind != "te"] == []


def test_the_newest_release_fits(request, tmp_path):
    core = archived_core(newest_wheel(request, tmp_path))
    assert re.fullmatch(r"0\.\d+\.\d+\w*", core.version)
    assert [f for f in check(CORE_PATCHES, core, with_torch=False) if f.status != FITS] == []


def test_every_entry_is_complete_and_named_once():
    assert len({(patch.name, patch.when) for patch in MANIFEST}) == len(MANIFEST)
    for patch in MANIFEST:
        assert patch.why and patch.checked_on and patch.kind in ("core", "torch")
        assert (Path(registry.__file__).parent / f"{patch.file}.py").is_file()


REPLACES = """
import sys
import torch.distributed.nn, megatron.core.fusions.fused_softmax, megatron.core.tensor_parallel.layers
from types import SimpleNamespace
from ft.job.agent import forking
from ft.state.groups import seam
from ft.systems.dmr.runtime import functions

def everything():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "megatron") and not name.startswith(("megatron.patches", "torch._dynamo")):
            found |= {f"{name}.{key}": value for key, value in vars(module).items() if callable(value)}
    for kind in [value for value in found.values() if isinstance(value, type)]:
        found |= {f"{kind.__module__}.{kind.__qualname__}.{key}": value for key, value in vars(kind).items()}
    return found

before = everything()
seam.take_over()
functions.watch(SimpleNamespace(flags=[]), functions.functions_of_core(SimpleNamespace(gradient_accumulation_fusion=1)))
with forking.without_cuda():
    after = everything()
print(*(name for name in before if after.get(name) is not before[name]))
"""


def test_what_other_folders_replace_is_in_the_manifest():
    done = subprocess.run([sys.executable, "-c", REPLACES], check=True, capture_output=True, text=True, timeout=120)
    listed = {patch.name for patch in ELSEWHERE if patch.symbol != EVERY_FUNCTION}
    listed.add("torch.autograd.function.Function.__init_subclass__")
    of_core = tuple(f"{patch.module}." for patch in ELSEWHERE if patch.symbol == EVERY_FUNCTION)
    found = done.stdout.split()
    assert "torch.distributed.distributed_c10d._new_process_group_helper" in found
    assert any(name.startswith(of_core) for name in found) and "torch.cuda.current_device" in found
    assert [name for name in found if name not in listed and not name.startswith(of_core)] == []


@pytest.mark.parametrize(
    ("module", "old", "new", "symbol", "status", "found"),
    [
        ("mappings", "output_split_sizes=None", "sizes=None", "_gather_along_first_dim", CHANGED, "sizes=None"),
        ("random", "device: int = -1", "device: int = 0", "_set_cuda_rng_state", CHANGED, "device=0"),
        ("random", "def fork(", "def branch(", "CudaRNGStatesTracker.fork", MISSING, "no such symbol"),
    ],
)
def test_a_changed_core_is_refused_and_named(tmp_path, module, old, new, symbol, status, found):
    wheel = make_wheel(tmp_path, {f"tensor_parallel/{module}.py": (old, new)})
    core = archived_core(wheel)
    before = replaced()
    misfit = next(f for f in check(CORE_PATCHES, core, with_torch=False) if not f.fits)
    assert (misfit.patch.symbol, misfit.status) == (symbol, status)
    with pytest.raises(UserError) as refused:
        registry.apply([with_fields(patch, why="not applied yet") for patch in CORE_PATCHES], core)
    message = str(refused.value)
    for part in (f"megatron.core.tensor_parallel.{module}", symbol, found, core.version, SUPPORTED_CORE):
        assert part in message
    assert misfit.patch.signatures[0] in message
    assert replaced() == before


def test_a_symbol_that_core_lacks_may_be_added_but_not_replaced(tmp_path):
    core = archived_core(make_wheel(tmp_path, {"transformer/moe/moe_utils.py": ("te_general_gemm", "te_other_gemm")}))
    added = next(patch for patch in MANIFEST if patch.symbol == "te_general_gemm")
    assert check([added], core, with_torch=False)[0].status == FITS
    finding = check([with_fields(added, added=False)], core, with_torch=False)[0]
    assert finding.status == MISSING
    assert "no such symbol" in str(refusal(finding, core))


def make_wheel(folder, edits):
    """A wheel with the installed core's sources; `edits`: {path below megatron/core: (old, new)}."""
    core = Path(installed_core().origin)
    wheel = folder / "megatron_core-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted(core.rglob("*.py")):
            path = str(file.relative_to(core))
            source = file.read_text()
            if path in edits:
                assert edits[path][0] in source
                source = source.replace(*edits[path])
            archive.writestr(f"megatron/core/{path}", source)
    return wheel


# ------------------------------------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_succeeds(capsys):
    assert patches_command([]) == 0
    table = capsys.readouterr().out
    assert f"megatron-core {installed_core().version}" in table
    for patch in MANIFEST:
        assert patch.name in table
    assert max(map(len, table.splitlines())) <= 160


def test_the_command_reports_the_misfits_of_a_wheel(tmp_path, capsys):
    edits = {
        "tensor_parallel/random.py": ("device: int = -1", "device: int = 0"),
        "utils.py": ("def unwrap_model(model", "def unwrap_model(depth, model"),
    }
    wheel = make_wheel(tmp_path, edits)
    assert patches_command(["--wheel", str(wheel)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected (new_state, device=-1, graph_safe=False), found (new_state, device=0," in said
    place = r"megatron/ft_trainer/checkpointing/content\.py:\d+ megatron\.core\.utils: unwrap_model: lacks 'model' "
    assert re.search(place, said)
    assert patches_command(["--json", "--wheel", str(wheel)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    statuses = {patch["symbol"]: patch["status"] for patch in report["patches"]}
    assert statuses["_set_cuda_rng_state"] == CHANGED and statuses["jit_fuser"] == FITS
    assert statuses["Tensor.to"] == "not checked"
    assert [misfit["problem"] for misfit in report["calls"]["misfits"]] == ["lacks 'model'"] * 2


def test_a_call_that_does_not_fit_is_enough_to_fail(tmp_path, capsys):
    wheel = make_wheel(tmp_path, {"utils.py": ("def unwrap_model(model", "def unwrap_model(depth, model")})
    assert patches_command(["--wheel", str(wheel)]) == 1
    assert "calls: 2 misfits" in capsys.readouterr().out


def test_a_source_archive_is_read_too(tmp_path):
    core = Path(installed_core().origin)
    archive = tmp_path / "megatron_core-0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(core, "megatron_core-0/megatron/core", filter=lambda member: None if ".pyc" in member.name else member)
    assert patches_command(["--wheel", str(archive)]) == 0


def test_bad_input_is_one_message_and_status_2(tmp_path, capsys):
    text = tmp_path / "text.whl"
    text.write_text("no archive")
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something/else.py", "")
    cut = tmp_path / "cut.whl"
    cut.write_bytes(make_wheel(tmp_path, {}).read_bytes()[:-2000])
    broken = make_wheel(tmp_path, {"jit.py": ("def noop_decorator(func):", "def noop_decorator(func:")})
    for file, problem in (
        (tmp_path / "absent.whl", "no such file"),
        (tmp_path, "no such file"),
        (text, "neither a wheel nor"),
        (cut, "neither a wheel nor"),
        (other, "no megatron/core inside"),
        (broken, "does not parse"),
    ):
        assert patches_command(["--wheel", str(file)]) == 2
        printed = capsys.readouterr()
        assert problem in printed.err and str(file) in printed.err
        assert printed.err.count("\n") <= 2 and not printed.out


# ------------------------------------------------------------------------------------------ the platform


def test_a_machine_with_cuda_gets_nothing_of_the_cpu_platform():
    assert choose_platform(True) == Platform("cuda", "nccl")
    assert choose_platform(False) == Platform("cpu", "gloo")
    assert not any(patch.when == ON_CPU or patch.file.startswith("cpu") for patch in registry.due("cuda"))
    assert {patch.when for patch in registry.due("cpu")} <= {ALWAYS, ON_CPU}
    assert registry.due("cpu") == [patch for patch in MANIFEST if patch.when in (ALWAYS, ON_CPU)]


class Pickled:
    """Is pickled as a call of ``function``."""

    def __init__(self, function, *args):
        self.how = function, args

    def __reduce__(self):
        return self.how


def test_members_of_enumerations_that_debian_s_python_has_pickled_can_be_loaded():
    import io
    import pickle

    import torch

    from megatron.core.transformer.enums import AttnBackend
    from megatron.patches import stored_types

    def loaded(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    stored_types.apply()
    assert loaded(Pickled(getattr, AttnBackend, "flash")) is AttnBackend.flash
    with pytest.raises(pickle.UnpicklingError, match="allowed of enumerations only"):
        loaded(Pickled(getattr, AttnBackend.flash, "value"))


def test_the_states_that_layers_unpickle_themselves_cannot_execute_code(tmp_path):
    """Transformer Engine's layers do so; it cannot be installed without a GPU."""
    import os
    import pickle

    import torch

    from megatron.ft_trainer.checkpointing import content

    class Layer(torch.nn.Module):
        def get_extra_state(self):
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state):
            self.loaded = pickle.loads(state.numpy().tobytes())

    def loaded(value):
        layer = Layer()
        state = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        content.apply({"model": {"_extra_state": state}}, [layer], None, None, with_optimizer=False)
        return layer.loaded

    scale = torch.arange(4.0)
    sound = loaded({"scale_fwd": scale, "amax_history_fwd": scale[1:], "extra_fp8_variables": {"num_gemms": 1}})
    assert torch.equal(sound["scale_fwd"], scale) and torch.equal(sound["amax_history_fwd"], scale[1:])
    harm = Pickled(os.mkdir, str(tmp_path / "was-executed"))
    within = Pickled(torch.storage._load_from_bytes, pickle.dumps(harm))
    handed_on = Pickled(torch._tensor._rebuild_from_type_v2, torch.storage._load_from_bytes, object, (b"",), {})
    for hostile in (harm, [{"scale": harm}], within, handed_on):
        with pytest.raises(pickle.UnpicklingError):
            loaded(hostile)
    assert not list(tmp_path.iterdir())
    assert pickle.loads(pickle.dumps(Pickled(str, 5))) == "5"
