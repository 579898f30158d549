"""What replicas that come and go do to the loss: the question of figures 8 and 9 of FT-HSDP, with a small model.

    python tools/experiments/hsdp_accuracy.py --seeds 3 --into FOLDER      trains, one line each in FOLDER
    python tools/experiments/hsdp_accuracy.py --report --into FOLDER       table and picture of what is there

A megatron-core GPT learns the standard library's sources byte by byte. All replicas are computed in one process, as one
batch of the samples of those that are healthy: that is what the sum of their gradients over the tokens that contributed
comes to. Who takes which samples (ft.systems.hsdp.samples) and how the learning rate is scaled (ft.systems.hsdp.work)
is production's. Settings are named as in the paper, d2x_for87_3reps_sqrt: two failures, of 87 steps each, of three
replicas at once, with the learning rate scaled by the root of the healthy part. Every setting of a seed begins with the
same first part, has the same failures as the others of its count and length, and trains until it has seen as many
tokens as without.
"""

import argparse
import copy
import json
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from ft.systems.hsdp.place import LINEAR, NONE, SQRT  # noqa: E402
from ft.systems.hsdp.samples import SampleAssignment  # noqa: E402
from ft.systems.hsdp.work import factor  # noqa: E402

REPLICAS, BATCH, SEQ, VOCAB = 8, 2, 48, 256
STEPS, FIRST = 400, 160
"""Total steps, and the steps before the first failure (FT-HSDP: 200 of 500 billion tokens)."""
SHORT, MIDDLE, LONG = 5, 25, 87
"""Steps that a failure lasts; 87 of 240 correspond to the 4,000 of 11,000 of FT-HSDP's longest."""
LR, LEAST_LR, WARMUP = 3e-3, 3e-4, 20
EVERY, HELD_OUT = 40, 96
"""Steps between two evaluations on the held-out samples, and the number of these samples."""


@dataclass(frozen=True)
class Setting:
    """One run. ``other``: 0, or the number of another order of the samples, to measure the noise without failures."""

    count: int = 0
    length: int = 0
    replicas: int = 0
    lr: str = NONE
    other: int = 0

    @property
    def name(self) -> str:
        if not self.count:
            return f"no failures, order {self.other}" if self.other else "no failures"
        return f"d{self.count}x_for{self.length}_{self.replicas}reps_{self.lr}"


COUNTS = ((2, SHORT), (2, MIDDLE), (2, LONG), (8, SHORT))
SETTINGS = [
    Setting(),
    Setting(other=1),
    Setting(other=2),
    *(Setting(count, length, gone, lr) for count, length in COUNTS for gone in (1, 3) for lr in (NONE, LINEAR, SQRT)),
]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="train with seeds 0 to N - 1")
    parser.add_argument("--into", type=Path, required=True, help="folder for the results")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--report", action="store_true", help="write table and picture from what is in --into")
    given = parser.parse_args(argv)
    given.into.mkdir(parents=True, exist_ok=True)
    results, began = given.into / "runs.jsonl", time.monotonic()
    done = {(row["seed"], row["name"]) for row in read(results)}
    for seed in range(given.seeds):
        wanted = [setting for setting in SETTINGS if (seed, setting.name) not in done]
        if not wanted:
            continue
        trainer = Trainer(seed)
        for setting in wanted:
            if time.monotonic() - began > given.stop_after:
                return 0
            row = trainer.run(setting)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seed {seed}  {setting.name:24s}  {row['held_out'][-1][1]:.4f}  {row['took_s']:.1f} s", flush=True)
    if given.report:
        import hsdp_accuracy_report

        print(hsdp_accuracy_report.write(read(results), ROOT))
    return 0


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def failures(setting: Setting, seed: int) -> list[tuple[int, frozenset[int]]]:
    """Return (first step, absent replicas) of each failure. The same for all learning rates;
    the only absent replica of one setting is one of the three of another."""
    rng = random.Random(f"{seed} {setting.count} {setting.length}")
    stretch = (STEPS - FIRST) // max(setting.count, 1)
    found = []
    for number in range(setting.count):
        first = FIRST + number * stretch + rng.randrange(max(1, stretch - setting.length))
        found.append((first, frozenset(rng.sample(range(REPLICAS), 3)[: setting.replicas])))
    return found


def healthy_at(step: int, setting: Setting, schedule: list[tuple[int, frozenset[int]]]) -> list[int]:
    away = {r for first, who in schedule if first <= step < first + setting.length for r in who}
    return [replica for replica in range(REPLICAS) if replica not in away]


class Trainer:
    """One seed: its model, data and failure-free first part; ``run`` continues from there."""

    def __init__(self, seed: int):
        import torch

        from megatron.core import parallel_state

        self.seed, self.torch = seed, torch
        if not parallel_state.model_parallel_is_initialized():
            begin_alone()
        torch.manual_seed(seed)
        self.model = build_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
        self.samples, self.held_out = corpus(seed)
        self.assignment = SampleAssignment(REPLICAS, BATCH)
        self.streams = self.assignment.streams()
        self.kept = self._state()
        self.first_parts = {}

    def run(self, setting: Setting) -> dict:
        """Return the losses of every step and of the held-out samples, each with the tokens trained on before."""
        began, torch = time.monotonic(), self.torch
        schedule, order = failures(setting, self.seed), torch.Generator().manual_seed(1000 * self.seed + setting.other)
        mixed = torch.randperm(len(self.samples), generator=order)
        self._begin(setting, mixed)
        step, tokens, train, held_out = self.at
        train, held_out = list(train), list(held_out)
        while tokens < STEPS * REPLICAS * BATCH * SEQ:
            healthy = healthy_at(step, setting, schedule)
            loss = self._step(step, healthy, setting, mixed)
            tokens += len(healthy) * BATCH * SEQ
            step += 1
            train.append((tokens, round(loss, 5)))
            if len(train) % EVERY == 0:
                held_out.append((tokens, self._look()))
        held_out.append((tokens, self._look()))
        return {
            "seed": self.seed,
            "name": setting.name,
            "steps": step,
            "train": train,
            "held_out": held_out,
            "failures": [(first, sorted(who)) for first, who in schedule],
            "took_s": round(time.monotonic() - began, 1),
        }

    def _begin(self, setting: Setting, mixed) -> None:
        """Go to the end of the first part, which all settings with the same order of samples share."""
        if setting.other not in self.first_parts:
            self._restore(self.kept)
            self.positions = [0] * REPLICAS
            train, held_out, tokens = [], [], 0
            for step in range(FIRST):
                loss = self._step(step, list(range(REPLICAS)), setting, mixed)
                tokens += REPLICAS * BATCH * SEQ
                train.append((tokens, round(loss, 5)))
                if len(train) % EVERY == 0:
                    held_out.append((tokens, self._look()))
            at = (FIRST, tokens, train, held_out)
            self.first_parts[setting.other] = (self._state(), list(self.positions), at)
        state, positions, self.at = self.first_parts[setting.other]
        self._restore(state)
        self.positions = list(positions)

    def _step(self, step: int, healthy: list[int], setting: Setting, mixed) -> float:
        """Run one committed step in a quorum of the replicas ``healthy``."""
        torch = self.torch
        indices = []
        for replica in healthy:
            place = self.positions[replica]
            indices += [int(self.streams[replica].index(place + i)) for i in range(BATCH)]
            self.positions[replica] += BATCH
        rows = self.samples[mixed[torch.tensor(indices) % len(mixed)]]
        loss = self._loss(rows)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step) * factor(len(healthy), REPLICAS, setting.lr)
        self.optimizer.step()
        return loss.item()

    def _look(self) -> float:
        with self.torch.no_grad():
            return round(self._loss(self.held_out).item(), 5)

    def _loss(self, rows):
        tokens, labels = rows[:, :-1], rows[:, 1:]
        places = self.torch.arange(SEQ).expand_as(tokens)
        return self.model(tokens.contiguous(), places, None, labels=labels.contiguous()).mean()

    def _state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def _restore(self, state) -> None:
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: warm-up, then linear decay, as in FT-HSDP's baseline."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = min(1.0, (step - WARMUP) / (STEPS - WARMUP))
    return LR + (LEAST_LR - LR) * done


def begin_alone() -> None:
    """Initialize megatron-core with a world of this process alone, on the CPU platform."""
    import torch.distributed as dist

    from megatron import patches

    patches.apply()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def build_model(seed: int):
    """Return a GPT model of 2 layers with hidden size 64."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def corpus(seed: int):
    """Return (training samples, held-out samples), each (n, SEQ + 1) bytes of the standard library's sources."""
    import numpy
    import torch

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    whole = numpy.frombuffer(text[: len(text) // (SEQ + 1) * (SEQ + 1)], dtype=numpy.uint8)
    rows = torch.from_numpy(whole.reshape(-1, SEQ + 1).astype(numpy.int64))
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(77))
    return rows[mixed[HELD_OUT:]], rows[mixed[:HELD_OUT]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
