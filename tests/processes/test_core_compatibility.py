"""What we take from megatron-core exists in every supported release, and takes the arguments that we pass."""

import ast
from pathlib import Path

import pytest
from core_wheels import newest_wheel

from megatron.patches.calls import check_calls
from megatron.patches.names import Names
from megatron.patches.signatures import signature
from megatron.patches.sources import CoreSources, OwnSources, archived_core, installed_core

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=["installed", "newest"])
def core(request, tmp_path) -> CoreSources:
    return installed_core() if request.param == "installed" else archived_core(newest_wheel(request, tmp_path))


@pytest.mark.newest
def test_what_we_import_is_there_and_what_we_call_takes_our_arguments(core):
    found = check_calls(OwnSources(), core)
    assert found.misfits == []
    assert found.calls > 100


def test_every_field_of_the_configuration_is_there(core):
    ours = ("_network", "_kernels", "_parallelism")
    body = ast.parse((ROOT / "megatron/ft_trainer/config.py").read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    trees = [function for function in functions if function.name in ours]
    dicts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key.value for node in dicts for key in node.keys if key]
    keys = [key for key in keys if key not in ("fp4_param", "rope_type")]  # of some releases and configurations only
    assert "num_query_groups" in keys and "pipeline_dtype" in keys
    names = Names(core.tree, core.is_package)
    config = signature(names, names.of("megatron.core.transformer", "TransformerConfig")[0])
    assert [key for key in keys if key not in config.positional] == []
