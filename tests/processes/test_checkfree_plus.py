"""CheckFree+ computes what one process does that takes half of its microbatches through the blocks in swapped order."""

import re

import pytest
import small_runs as runs
from checkfree_jobs import assemble

PP4 = "--pipeline-model-parallel-size 4 --num-layers 4 --ft-hot-swap --ft-checkfree-plus "
TIED = "--position-embedding-type learned_absolute "
UNTIED = "--untie-embeddings-and-output-weights "
SHAPE = runs.BASE.replace("--untie-embeddings-and-output-weights ", "") + "--global-batch-size 8 --micro-batch-size 1 "


def named(job):
    """(name in the whole model, parameter) of this rank; a tied output layer goes by the embedding's name."""
    from megatron.core.utils import get_attr_wrapped_model

    model = get_attr_wrapped_model(job.trainee.chunks[0], "pre_process", return_model_obj=True)
    numbers = {index: layer.layer_number for index, layer in enumerate(model.decoder.layers)}
    for name, param in model.named_parameters():
        name = re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{numbers[int(found[1])]}.", name)
        if model.share_embeddings_and_output_weights and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, param


def plant(job) -> None:
    """The same values under the same names, whoever has them."""
    import zlib

    import torch

    for name, param in named(job):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        param.data.copy_(0.05 * values + (1.0 if name.endswith("norm.weight") else 0.0))
    job.trainee.optimizer.reload_model_params()


def gradients(job) -> tuple[dict, list]:
    from megatron.ft_trainer.loop import _zero_gradients, run_schedule

    _zero_gradients(job)
    reported = run_schedule(job, job.train_loaders, job.options.training.global_batch_size, forward_only=False)
    found = {}
    for name, param in named(job):
        found[name] = param.main_grad.detach().clone()
    total = [float(sum(each[i] for each in reported)) for i in range(2)] if reported else []
    return found, total


def by_stages(flags: str) -> tuple[dict, list]:
    job, _ = assemble(flags)
    plant(job)
    return gradients(job)


def in_one_process(flags: str, stages: int) -> tuple[dict, list]:
    import torch

    from megatron.core.utils import get_attr_wrapped_model

    job, _ = assemble(flags)
    plant(job)
    model = get_attr_wrapped_model(job.trainee.chunks[0], "pre_process", return_model_obj=True)
    layers = list(model.decoder.layers)
    blocks = [layers[i * len(layers) // stages : (i + 1) * len(layers) // stages] for i in range(stages)]
    order = [1, 0, *range(2, stages - 2), stages - 1, stages - 2]
    swapped = [layer for stage in order for layer in blocks[stage]]
    microbatch = 0

    def take_turns(*_):
        nonlocal microbatch
        model.decoder.layers = torch.nn.ModuleList(swapped if microbatch % 2 else layers)
        microbatch += 1

    model.register_forward_pre_hook(take_turns)
    found, total = gradients(job)
    model.decoder.layers = torch.nn.ModuleList(layers)
    return found, total


LAYOUTS = {
    "pp4-tied-recomputed": (
        4,
        4,
        PP4 + TIED + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "pp6-untied-overlapped": (
        6,
        6,
        "--pipeline-model-parallel-size 6 --num-layers 6 --ft-hot-swap --ft-checkfree-plus --use-distributed-optimizer "
        "--overlap-grad-reduce " + UNTIED,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(name, ranks, corpus):
    import torch

    world, stages, flags = LAYOUTS[name]
    flags = f"{SHAPE} {flags} --data-path {corpus}"
    single = flags.replace("--ft-hot-swap --ft-checkfree-plus", "").replace(
        f"--pipeline-model-parallel-size {stages}", ""
    )
    ((expected, loss),) = ranks(in_one_process, 1, single, stages)
    found = ranks(by_stages, world, flags)
    seen = set()
    for have, total in found:
        for key, gradient in have.items():
            assert torch.allclose(gradient, expected[key], rtol=1e-4, atol=1e-6), key
            seen.add(key)
        if total:
            assert total == pytest.approx(loss, rel=1e-5)
    assert seen == set(expected) and sum(bool(total) for _, total in found) == 1
