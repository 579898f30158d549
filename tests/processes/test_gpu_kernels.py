"""Which fused kernels the trainer asks megatron-core for, depending on the GPU packages that can be imported.

The packages are planted: empty modules of their names on ``sys.path``, with a platform that says that there is a GPU.
"""

import importlib.util
import sys

import pytest
import small_runs as runs

from megatron.core.tensor_parallel import layers
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import parse
from megatron.patches import Platform

EXTENSION = "fused_weight_gradient_mlp_cuda"
FITS, OTHER_TORCH = "", "raise ImportError('undefined symbol: _ZN3c104cuda')"


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Return a function that puts modules (name -> source) on ``sys.path`` of a machine with a GPU."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model.patches, "platform", lambda: Platform("cuda", "nccl"))

    def write(modules):
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    yield write
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def core_has_the_extension():
    """Return what megatron-core itself finds: its output layer raises if the fusion is on and this is False."""
    spec = importlib.util.spec_from_file_location("megatron.core.tensor_parallel.layers_again", layers.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again._grad_accum_fusion_available


@pytest.mark.newest
@pytest.mark.parametrize(
    "modules, expected",
    [
        ({"transformer_engine": ""}, False),
        ({"apex": ""}, False),
        ({"transformer_engine": "", "apex": "", EXTENSION: OTHER_TORCH}, False),
        ({"apex": "", EXTENSION: FITS}, True),
        ({"transformer_engine": "", EXTENSION: FITS}, True),
    ],
)
def test_weight_gradients_are_accumulated_by_the_extension_that_core_can_import(modules, expected, plant):
    plant(modules)
    assert core_has_the_extension() is expected
    asked = model._kernels(parse(f"{runs.BASE} --mock-data"))
    assert asked["gradient_accumulation_fusion"] is expected
    without = model._kernels(parse(f"{runs.BASE} --mock-data --no-gradient-accumulation-fusion"))
    assert without["gradient_accumulation_fusion"] is False
