"""DMR's estimator: parameters and FLOPs against published figures, memory against known rules, times by hand."""

import pytest

from ft.lab.estimate.block import OperatorWork, Transfer, backward, forward, head, saved_bytes, seconds
from ft.lab.estimate.cluster import DEVICES, MODELS, RESERVED, STATES, GpuCluster, JobSizes, fitted
from ft.lab.estimate.profile import over_units, stage_memory
from ft.systems.schedule.kinds import Pipeline, orders

LLAMA, GPT3, SCOUT = MODELS["llama3-70b"], MODELS["gpt3-175b"], MODELS["llama4-scout"]


def test_a_mixture_of_experts_has_109_billion_parameters_and_17_are_active():
    vision_encoder = 0.87e9
    assert SCOUT.parameters + vision_encoder == pytest.approx(109e9, rel=0.005)
    assert SCOUT.active_parameters == pytest.approx(17e9, rel=0.015)


def test_flops_are_megatron_s_formula():
    """Narayanan et al. 2021, equation (3), without the recomputed forward: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    s, layers, h, vocabulary = GPT3.sequence, GPT3.layers, GPT3.hidden, GPT3.vocabulary
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert GPT3.flops_per_token() == pytest.approx(formula, rel=1e-9)


def test_flops_of_llama_3_405b_are_the_published_3_8e25():
    assert MODELS["llama3-405b"].flops_per_token() * 15.6e12 == pytest.approx(3.8e25, rel=0.04)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_operators_of_a_layer_add_up_to_the_model_s_flops(name, fused):
    model = MODELS[name]
    layout = fitted(model, GpuCluster(DEVICES["h200"], 8), 1, fused_gate=fused)
    flops = {
        part: layout.tp * sum(step.flops for step in steps if isinstance(step, OperatorWork))
        for part, steps in {"layer": forward(model, layout), "head": head(model, layout)}.items()
    }
    total = 3 * (model.layers * flops["layer"] + flops["head"])
    assert total == pytest.approx(model.flops_per_token() * model.sequence, rel=1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_backward_has_two_products_for_each_and_turns_every_transfer_round(name, fused):
    layout = fitted(MODELS[name], GpuCluster(DEVICES["h200"], 8), 1, fused_gate=fused)
    steps = forward(MODELS[name], layout)
    back = backward(steps)

    def products(part):
        return sum(step.flops for step in part if isinstance(step, OperatorWork) and step.kind == "product")

    assert products(back) == pytest.approx(2 * products(steps))
    sent = [[step.sent for step in part if isinstance(step, Transfer)] for part in (steps, back)]
    assert sent[0] == sent[1][::-1]
    made = {"d y"}
    for step in back:
        gradients = [step.source] if isinstance(step, Transfer) else [one for one in step.inputs if one[:2] == "d "]
        assert made.issuperset(gradients), step
        made |= {step.target} if isinstance(step, Transfer) else set(step.outputs)
    assert "d x" in made


def test_without_recomputation_a_layer_keeps_34_sbh_over_tp():
    """Korthikanti et al. 2022, table 2, with sequence parallel and no scores kept; 2 of the 34 are dropout masks."""
    layout = JobSizes(tp=8, pp=8)
    masks = 2
    assert saved_bytes(forward(GPT3, layout)) / (GPT3.sequence * GPT3.hidden / 8) + masks == 34


def test_with_full_recomputation_a_layer_keeps_2_sbh_over_tp():
    kept = stage_memory(LLAMA, JobSizes(tp=8, pp=4), 1).kept
    assert kept == (20 * 2 * LLAMA.sequence * LLAMA.hidden / 8,)


@pytest.mark.parametrize(("dp", "state", "each"), [(1, "megatron", 18), (4, "megatron", 6 + 12 / 4), (1, "titan", 16)])
def test_states_are_18_bytes_of_each_parameter_and_copies_share_12(dp, state, each):
    layout = JobSizes(tp=8, pp=2, dp=dp, state=STATES[state])
    total = 8 * sum(stage_memory(LLAMA, layout, stage).states for stage in range(2))
    assert total == pytest.approx(each * LLAMA.parameters, rel=1e-6)


def peak(model, layout: JobSizes, stage: int) -> float:
    order = orders(Pipeline(layout.pp, layout.microbatches, layout.chunks))[stage]
    return max(running for _, running, _ in over_units(stage_memory(model, layout, stage), order))


def held(layout: JobSizes, stage: int) -> float:
    """Microbatches in flight at most, counted in those of a whole stage."""
    memory = stage_memory(LLAMA, layout, stage)
    return (peak(LLAMA, layout, stage) - memory.states - memory.working - memory.ends) / sum(memory.kept)


def test_earlier_stages_hold_more_microbatches_until_there_are_no_more():
    layout = JobSizes(tp=8, pp=4, batch=3)
    assert [held(layout, stage) for stage in range(4)] == pytest.approx([3, 3, 2, 1])


def test_the_interleaved_schedule_holds_1_plus_p_minus_1_over_pv_times_as_much():
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds 1 + (p - 1) / (p m) as much with m chunks."""
    for chunks in (1, 2, 5):
        layout = JobSizes(tp=8, pp=4, batch=16, chunks=chunks)
        more = 1 + 3 / (4 * chunks) if chunks > 1 else 1
        assert held(layout, 0) == pytest.approx(4 * more)


def test_tight_memory_forces_more_stages_as_in_the_paper():
    """80 GB: Llama-3-70B needs 3 stages and Mistral-Large 4; 94 GB: 2 and 3."""
    for name, fewest in (("llama3-70b", {80: 3, 94: 2}), ("mistral-large-123b", {80: 4, 94: 3})):
        for budget, pp in fewest.items():
            model, fits = MODELS[name], []
            for stages in (pp - 1, pp):
                cluster = GpuCluster(DEVICES["h200"], 8 * stages)
                layout = fitted(model, cluster, stages, batch=16, state=STATES["titan"])
                most = max(peak(model, layout, stage) for stage in range(stages)) + RESERVED
                fits.append(most <= budget * 1e9)
            assert fits == [False, True], (name, budget)


def test_a_product_takes_its_flops_and_an_elementwise_operator_its_bytes():
    cluster = GpuCluster(DEVICES["h200"], 8)
    steps = {step.name: step for step in forward(LLAMA, JobSizes(tp=8, pp=1))}
    flops = 2 * 8192 * 8192 * 2 * 28672 / 8
    assert seconds(steps["mlp_up"], cluster) == pytest.approx(flops / (989e12 * 0.70))
    assert seconds(steps["norm1"], cluster) == pytest.approx(2 * 8192 * 8192 * 2 / 8 / (4.8e12 * 0.80))


def test_a_gather_sends_all_but_its_own_part_and_nothing_without_tensor_parallel():
    cluster = GpuCluster(DEVICES["h200"], 8, slowdown=3.0)
    steps = {step.name: step for step in forward(LLAMA, JobSizes(tp=8, pp=1))}
    sent = 8192 * 8192 * 2 * 7 / 8
    assert seconds(steps["gather norm1"], cluster) == pytest.approx(3 * (sent / (450e9 * 0.75) + 20e-6))
    alone = [step for step in forward(LLAMA, JobSizes(tp=1, pp=1)) if isinstance(step, Transfer)]
    assert alone and all(seconds(step, cluster) == 0 for step in alone)


def test_experts_exchange_tokens_and_spread_over_any_part_of_the_tensor_parallel_ranks():
    flops = []
    for ep in (1, 2, 8):
        steps = forward(SCOUT, JobSizes(tp=8, pp=1, ep=ep))
        exchanged = [step.name for step in steps if isinstance(step, Transfer) and step.kind == "ep"]
        assert exchanged == ["dispatch", "combine"]
        flops.append(sum(step.flops for step in steps if isinstance(step, OperatorWork)))
    assert flops == pytest.approx([flops[0]] * 3)
