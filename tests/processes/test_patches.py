"""The manifest fits the cores we support and lists all that is replaced; misfits are refused by name."""

from dataclasses import fields
from dataclasses import replace as with_fields
from importlib import import_module
from pathlib import Path

import pytest
from pythons import python

from ft.base.errors import UserError
from megatron.patches import registry, replace
from megatron.patches.__main__ import main as patches_command
from megatron.patches.manifest import (
    ELSEWHERE,
    EVERY_FUNCTION,
    ONCE_PER_PROCESS,
    SUPPORTED_CORE,
)
from megatron.patches.registry import CHANGED, FITS, MISSING, NOT_CHECKED, check, core_version, everything, refusal
from megatron.patches.replace import replaced

MAPPINGS, RANDOM = "megatron.core.tensor_parallel.mappings", "megatron.core.tensor_parallel.random"


@pytest.mark.newest
def test_the_installed_core_fits():
    findings = check([*everything(), *ELSEWHERE])
    assert [finding for finding in findings if not finding.fits] == []
    assert {each.patch.package for each in findings if each.status == NOT_CHECKED} == {"transformer_engine"}


def test_every_entry_is_complete_and_named_once():
    assert len({(patch.name, patch.when) for patch in everything()}) == len(everything())
    for patch in everything():
        assert patch.why and patch.package in ("megatron", "torch")
        assert (Path(registry.__file__).parent / f"{patch.file}.py").is_file()


REPLACES = """
import sys
import torch.distributed.nn, torch._inductor.output_code, megatron.core.fusions.fused_softmax
import megatron.core.tensor_parallel.layers
from types import SimpleNamespace
from ft.job.agent import preload
from ft.state.groups.registry import take_over
from ft.systems.dmr.runtime import functions
from megatron import patches
from megatron.patches import registry
from megatron.patches.manifest import ALWAYS, MODULES, ON_CPU

registry.check(registry.everything())  # imports the modules

def everything():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "megatron") and not name.startswith(("megatron.patches", "torch._dynamo")):
            found |= {f"{name}.{key}": value for key, value in vars(module).items() if not key.startswith("__")}
    for kind in [value for value in found.values() if isinstance(value, type)]:
        found |= {f"{kind.__module__}.{kind.__qualname__}.{key}": value for key, value in vars(kind).items()}
    return found

def print_changes(what, before, after):
    print(what, *(name for name in before if after.get(name) is not before[name]))

before = everything()
take_over()
functions.watch(SimpleNamespace(flags=[]), functions.functions_of_core(SimpleNamespace(gradient_accumulation_fusion=1)))
with preload.without_cuda():
    print_changes("elsewhere", before, after := everything())
before = everything()
patches.apply(*set(MODULES) - {ALWAYS, ON_CPU})
print_changes("patches", before, everything())
"""


def test_all_that_is_replaced_in_torch_and_core_is_in_the_manifest():
    done = python("-c", REPLACES)
    assert done.returncode == 0, done.stderr
    changed = {what: names for what, *names in map(str.split, done.stdout.splitlines())}
    listed = {patch.name for patch in ELSEWHERE if patch.symbol != EVERY_FUNCTION}
    listed.add("torch.autograd.function.Function.__init_subclass__")
    of_core = tuple(f"{patch.module}." for patch in ELSEWHERE if patch.symbol == EVERY_FUNCTION)
    found = changed["elsewhere"]
    assert "torch.distributed.distributed_c10d._new_process_group_helper" in found
    assert any(name.startswith(of_core) for name in found) and "torch.cuda.current_device" in found
    assert [name for name in found if name not in listed and not name.startswith(of_core)] == []
    listed = tuple(patch.name for patch in everything())
    inside = tuple(f"{name}." for name in listed)  # of a class that is replaced as a whole
    found = set(changed["patches"]) - {"torch._weights_only_unpickler._marked_safe_globals_set"}  # torch's public list
    schedules = "megatron.core.pipeline_parallel.schedules"
    assert {"torch.empty", f"{RANDOM}._set_cuda_rng_state", f"{schedules}.forward_step"} <= found
    assert [name for name in found if name not in listed and not name.startswith(inside)] == []


@pytest.mark.parametrize(
    ("module", "symbol", "new", "status", "found"),
    [
        (MAPPINGS, "_gather_along_first_dim", lambda input_, group, sizes=None: None, CHANGED, "sizes=None"),
        (RANDOM, "_set_cuda_rng_state", lambda new_state, device=0, graph_safe=False: None, CHANGED, "device=0"),
        (RANDOM, "CudaRNGStatesTracker.fork", None, MISSING, "no such symbol"),
    ],
)
def test_a_changed_core_is_refused_and_named(monkeypatch, module, symbol, new, status, found):
    *path, name = symbol.split(".")
    owner = import_module(module)
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.delitem(replace._originals, f"{module}.{symbol}", raising=False)  # other tests may have applied it
    if new is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, new)
    before, of_core = replaced(), [patch for patch in everything() if patch.package == "megatron"]
    misfit = next(finding for finding in check(of_core) if not finding.fits)
    assert (misfit.patch.symbol, misfit.status) == (symbol, status)
    with pytest.raises(UserError) as refused:
        registry.apply([with_fields(patch, why="not applied yet") for patch in of_core])
    for part in (module, symbol, found, core_version(), SUPPORTED_CORE, misfit.patch.signatures[0]):
        assert part in str(refused.value)
    assert replaced() == before


def test_a_symbol_that_core_lacks_may_be_added_but_not_replaced(monkeypatch):
    added = next(patch for patch in everything() if patch.symbol == "te_general_gemm")
    monkeypatch.delitem(replace._originals, added.name, raising=False)
    monkeypatch.delattr(import_module(added.module), "te_general_gemm", raising=False)
    assert check([added])[0].status == FITS
    finding = check([with_fields(added, added=False)])[0]
    assert finding.status == MISSING
    assert "no such symbol" in str(refusal(finding))


@pytest.mark.newest
def test_every_field_of_the_configuration_is_there():
    """The trainer passes these fields to core's configuration by name."""
    import ast

    from megatron.core.transformer import TransformerConfig

    body = ast.parse(Path(import_module("megatron.ft_trainer.model").__file__).read_text()).body
    ours = ("_network", "_kernels", "_parallelism")
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in ours]
    dicts = [node for tree in functions for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key.value for node in dicts for key in node.keys if key]
    keys = [key for key in keys if key not in ("fp4_param", "rope_type")]  # of some releases and configurations only
    assert "num_query_groups" in keys and "pipeline_dtype" in keys
    assert set(keys) <= {field.name for field in fields(TransformerConfig)}


def test_the_command_prints_a_table_and_succeeds(capsys):
    assert patches_command([]) == 0
    table = capsys.readouterr().out
    assert f"megatron-core {core_version()}" in table
    for name in (*(patch.name for patch in everything()), *ONCE_PER_PROCESS):
        assert name in table
    assert max(map(len, table.splitlines())) <= 160


def test_the_command_reports_misfits(monkeypatch, capsys):
    def changed(new_state, device=0, graph_safe=False):
        return None

    monkeypatch.delitem(replace._originals, f"{RANDOM}._set_cuda_rng_state", raising=False)
    monkeypatch.setattr(import_module(RANDOM), "_set_cuda_rng_state", changed)
    assert patches_command([]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected (new_state, device=-1, graph_safe=False), found (new_state, device=0, graph_safe=False)" in said
    assert f"1 {CHANGED}" in said


def test_without_a_core_the_command_says_what_to_install():
    program = (
        "import sys; sys.modules['megatron.core'] = None\nfrom megatron.patches.__main__ import main\nexit(main([]))"
    )
    done = python("-c", program)
    assert done.returncode == 2 and done.stderr.startswith("error: megatron-core is not installed"), done.stderr
    assert "pip install megatron-core" in done.stderr and "Traceback" not in done.stderr


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
