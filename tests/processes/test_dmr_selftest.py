"""``ft dmr selftest``: operators that are not reproducible are found, and left out of a run that is told of them."""

import json

import pytest
import small_runs as runs
import torch
from harness import RankFailed

from ft import cli
from ft.lab.reproducibility.probe import (
    NOT_TRIED,
    REFUSED,
    STABLE,
    UNSTABLE,
    Case,
    Kind,
    Probe,
    ProbeResult,
    as_text,
    as_values,
)

_library = torch.library.Library("planted", "FRAGMENT")
_library.define("noise(Tensor x) -> Tensor")
_library.define("noise_(Tensor(a!) x) -> Tensor(a!)")
_library.define("obedient(Tensor x) -> Tensor")
_library.define("stubborn(Tensor x) -> Tensor")
_own = torch.Generator()


def _noisy(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out.view(-1)[0] = torch.rand((), generator=_own).to(x.dtype)
    return out


def _obedient(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if torch.are_deterministic_algorithms_enabled() else _noisy(x)


def _stubborn(x: torch.Tensor) -> torch.Tensor:
    torch._C._get_deterministic_algorithms()
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("stubborn does not have a deterministic implementation")
    return _noisy(x)


_library.impl("noise", _noisy, "CPU")
_library.impl("noise_", lambda x: x.copy_(_noisy(x)), "CPU")
_library.impl("obedient", _obedient, "CPU")
_library.impl("stubborn", _stubborn, "CPU")
planted = torch.ops.planted

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-2 "
    "--vocab-size 500 --tokenizer-type NullTokenizer --hidden-dropout 0.1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)


def probed(work, runs: int = 4) -> dict[Kind, object]:
    probe = Probe(runs)
    with probe:
        work()
    return {kind.operator: finding for kind, finding in probe.findings.items()}


def test_a_planted_operator_is_found_and_no_other():
    def work():
        x = torch.randn(8, 5)
        y = torch.nn.functional.dropout(x @ x.T, 0.5)
        planted.noise(y)
        planted.noise_(y)
        y.add_(1).bernoulli_(0.3)
        torch.exp(y, out=y)

    found = probed(work)
    assert {name for name, one in found.items() if not one.is_stable} == {"planted::noise", "planted::noise_"}
    noise = found["planted::noise"]
    assert (noise.calls, noise.runs, noise.differing, noise.elements, noise.output_elements) == (1, 4, 4, 1, 64)
    assert noise.deterministic == UNSTABLE
    assert {"mm", "randn", "bernoulli_.float", "exp.out"} <= found.keys()


def test_what_torch_offers_instead_is_tried():
    def work():
        planted.obedient(torch.ones(3))
        planted.stubborn(torch.ones(3))

    found = probed(work)
    assert found["planted::obedient"].deterministic == STABLE
    assert found["planted::stubborn"].deterministic == REFUSED
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert probed(lambda: planted.noise(torch.ones(3)))["planted::noise"].deterministic == NOT_TRIED
    finally:
        torch.use_deterministic_algorithms(False)


def test_watching_changes_nothing():
    def work():
        torch.manual_seed(7)
        x = torch.randn(16, 16, requires_grad=True)
        loss = torch.nn.functional.dropout(x @ x, 0.2).square().sum()
        loss.backward()
        with torch.no_grad():
            x.add_(x.grad, alpha=-0.1).bernoulli_(0.5)
        return loss.detach(), x.grad, x.detach(), torch.get_rng_state()

    expected = work()
    with Probe(3) as probe:
        watched = work()
    assert all(torch.equal(a, b) for a, b in zip(expected, watched, strict=True))
    assert all(finding.is_stable for finding in probe.findings.values())


def test_calls_of_a_kind_are_executed_again_a_few_times_only():
    found = probed(lambda: [torch.ones(4).mul(2.0) for _ in range(9)], runs=3)
    assert (found["mul.Tensor"].calls, found["mul.Tensor"].runs) == (2, 6)


def outcome(work) -> ProbeResult:
    probe = Probe(4)
    probe.case = "own"
    with probe:
        work()
    return ProbeResult("cpu", 1, "2.13.0", False, [Case("own", "--flags")], list(probe.findings.values()))


def test_the_table_says_what_can_be_done():
    def work():
        planted.noise(torch.ones(3, 7).mul(2.0))
        planted.obedient(torch.ones(3, dtype=torch.bfloat16))

    text = as_text(outcome(work))
    assert "planted::noise     float32     3 x 7" in text
    assert "1 of 21  not either" in text
    assert "1 of 3  reproducible" in text
    assert "1 of 2 operators become reproducible" in text
    assert "--ft-dmr-unstable unstable.json" in text
    assert "bit for bit" in as_text(outcome(lambda: torch.ones(3).mul(2.0)))
    values = json.loads(json.dumps(as_values(outcome(work))))
    assert [one["operator"] for one in values["unstable"]] == ["planted::noise", "planted::obedient"]
    assert values["unstable"][0]["differing_runs"] == 4
    assert "mul.Tensor" in values["stable"]


def selftest(*words: str) -> tuple[int, str]:
    """(exit code, output) of the command in a forked rank."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["dmr", "selftest", "--json", "--runs", "2", *words])
    return code, out.getvalue()


def plant_in_the_mlp() -> None:
    """Every MLP adds a little noise that no seed explains."""
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def noisy(self, hidden, *args, **kwargs):
        out, bias = forward(self, hidden, *args, **kwargs)
        return out + 1e-3 * torch.ops.planted.noise(out.detach()), bias

    MLP.forward = noisy


def selftest_with_noise(*words: str) -> tuple[int, str]:
    plant_in_the_mlp()
    return selftest(*words)


def test_the_operators_of_a_model_of_one_s_own(ranks):
    [(code, out)] = ranks(selftest, 1, "--flags", MODEL + "--bf16 --tensor-model-parallel-size 8", init=False)
    values = json.loads(out)
    assert code == 0
    assert not values["unstable"]
    assert {"native_layer_norm", "native_layer_norm_backward", "embedding_dense_backward"} <= set(values["stable"])


@pytest.mark.long
def test_the_built_in_models(ranks):
    [(code, out)] = ranks(selftest, 1, init=False)
    values = json.loads(out)
    assert code == 0
    assert len(values["stable"]) > 70
    assert {"_softmax", "topk", "index_put_", "scatter_add_", "bernoulli_.float", "addcdiv_"} <= set(values["stable"])


def launch_noisily(flags: str) -> int:
    plant_in_the_mlp()
    return runs.launch(flags)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_noisy_run_is_no_false_alarm_once_it_is_known(recompute, ranks, tmp_path):
    unstable = tmp_path / "unstable.json"
    [(code, out)] = ranks(selftest_with_noise, 1, "--flags", MODEL, "--out", str(unstable), init=False)
    assert code == 1
    assert [one["operator"] for one in json.loads(out)["unstable"]] == ["planted::noise"]
    how = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 " if recompute else ""
    flags = runs.BASE + how + f"--mock-data --train-iters 2 --ft-dmr piggyback --metrics-file {tmp_path}/m.jsonl "
    assert ranks(launch_noisily, 1, flags + f"--ft-dmr-unstable {unstable}", init=False) == [0]
    said = ranks.output(0)
    assert "unstable left out: planted::noise" in said
    assert "unchecked" in said
    assert len(runs.losses(tmp_path / "m.jsonl")) == 2
    with pytest.raises(RankFailed):
        ranks(launch_noisily, 1, flags, init=False)
    assert "planted::noise" in ranks.output(0)
    assert "went wrong" in ranks.output(0) or "wrong in" in ranks.output(0)
