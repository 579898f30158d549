"""Flags: Megatron-LM's names and meanings, and a clear word about everything that cannot work."""

import dataclasses

from ft.base.options import field_docs, spellings
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import Options


def test_every_field_has_a_help_text_and_a_flag_of_its_own():
    seen = {}
    for concern in dataclasses.fields(Options):
        docs = field_docs(concern.default_factory)
        for f in dataclasses.fields(concern.default_factory):
            assert docs.get(f.name) or concern.name == "core", f"{concern.name}.{f.name} has no docstring"
            for spelling in [s for group in spellings(f) for s in group]:
                assert spelling not in seen, f"{spelling} is both {seen[spelling]} and {f.name}"
                seen[spelling] = f.name
    assert "--num-layers" in arguments.help_text()
