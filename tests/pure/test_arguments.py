"""Flags: Megatron-LM's names and meanings, and a clear word about everything that cannot work."""

import dataclasses

from ft.base.options import field_docs, spellings
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import Options, check, parse

GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data "
)


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


def test_the_flags_of_a_llama_are_taken():
    options = parse(
        """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
        --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
        --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
        --global-batch-size 128 --train-iters 1953125 --lr-decay-iters 1949218 --lr-warmup-iters 3906
        --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
        --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
        --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
        --exit-duration-in-mins 235 --tensor-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
        --tokenizer-type NullTokenizer --vocab-size 128256 --split '99,1,0' --num-workers 1 --log-interval 1
        --eval-iters 32 --eval-interval 100
        --save-interval 1000 --distributed-timeout-minutes 60
        --save checkpoints --load checkpoints"""
    )
    layout = check(options, 8, has_te=True)
    assert (layout.tp, layout.dp) == (2, 4)
    assert options.core.add_bias_linear is False
    assert options.core.ffn_hidden_size == 14336
    assert options.data.split == "99,1,0"


def test_the_flags_of_another_trainer_are_not_guessed():
    assert arguments.read("--hiden-size 3")[0].core.hidden_size == 3
    assert arguments.read("--hiden-size 3", guesses=False)[0].core.hidden_size is None
