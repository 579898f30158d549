"""What we take from megatron-core exists in every supported release, and takes the arguments that we pass."""

import ast
import dataclasses
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
    from megatron.training.arguments.moe import MoeOptions

    tree = ast.parse((ROOT / "megatron/training/config.py").read_text())
    keys = [key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key]
    keys += [field.name for field in dataclasses.fields(MoeOptions) if field.name.startswith("moe_")]
    assert "hidden_size" in keys and "moe_router_topk" in keys
    names = Names(core.tree, core.is_package)
    config = signature(names, names.of("megatron.core.transformer", "TransformerConfig")[0])
    assert [key for key in keys if key not in config.positional] == []
