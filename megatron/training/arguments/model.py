"""Flags: the shape of the network and the kernels it runs on."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.training.arguments.schema import flag


@dataclass
class ModelOptions:
    """network size"""

    num_layers: int | None = None
    """Transformer layers."""

    hidden_size: int | None = None
    """Width of the residual stream."""

    ffn_hidden_size: int | None = None
    """Width of the MLP. Default: 4 x hidden size, or with --swiglu two thirds of that rounded to a multiple of 64."""

    num_attention_heads: int | None = None
    """Query heads."""

    kv_channels: int | None = None
    """Width of one head. Default: hidden size / heads."""

    group_query_attention: bool = False
    """Let several query heads share one key/value head (see --num-query-groups)."""

    num_query_groups: int = 1
    """Key/value heads under --group-query-attention."""

    max_position_embeddings: int | None = None
    """Longest sequence the position embedding covers. Default: --seq-length."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""

    use_rotary_position_embeddings: bool = False
    """Older spelling of --position-embedding-type rope."""

    rotary_base: int = 10000
    """Base of the rotary frequencies."""

    rotary_percent: float = 1.0
    """Share of each head that is rotated."""

    rotary_interleaved: bool = False
    """Rotate interleaved pairs rather than halves."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Linear interpolation of rotary positions for longer sequences."""

    use_rope_scaling: bool = False
    """Llama-3 style scaling of the rotary frequencies."""

    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalisation."""

    norm_epsilon: float = 1e-5
    """Epsilon of the normalisation."""

    apply_layernorm_1p: bool = False
    """Store the norm's weight around zero."""

    apply_residual_connection_post_layernorm: bool = False
    """Take the residual after the normalisation."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""

    swiglu: bool = False
    """Gated SiLU in the MLP."""

    squared_relu: bool = False
    """Squared ReLU in the MLP."""

    quick_geglu: bool = False
    """Gated quick-GELU in the MLP."""

    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases in the linear layers."""

    add_qkv_bias: bool = False
    """Keep a bias in the QKV projection all the same."""

    qk_layernorm: bool = False
    """Normalise queries and keys."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""

    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""

    hidden_dropout: float = 0.1
    """Dropout on the residual branches."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""

    apply_query_key_layer_scaling: bool = False
    """Scale attention scores by 1 / layer number (fp16 stability)."""

    def __post_init__(self):
        if self.use_rotary_position_embeddings:
            self.position_embedding_type = "rope"
        given = [n for n in ("swiglu", "squared_relu", "quick_geglu") if getattr(self, n)]
        if len(given) > 1:
            raise UserError(f"--{' and --'.join(given)} are all activations".replace("_", "-"), "give one of them")
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}", "a probability in [0, 1) is needed"
                )
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}", "give at least 1")
        if self.ffn_hidden_size is None and self.hidden_size:
            gated = int(4 * self.hidden_size * 2 / 3 / 64) * 64
            self.ffn_hidden_size = max(gated, 64) if self.swiglu else 4 * self.hidden_size
        if self.kv_channels is None and self.hidden_size and self.num_attention_heads:
            self.kv_channels = self.hidden_size // self.num_attention_heads


@dataclass
class KernelOptions:
    """kernels"""

    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Layer implementation. Default: Transformer Engine where it is installed and a GPU is present, else local."""

    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """Attention kernel of Transformer Engine."""

    use_flash_attn: bool = False
    """Older spelling of --attention-backend flash."""

    masked_softmax_fusion: bool = True
    """Fuse scaling, masking and softmax."""

    bias_gelu_fusion: bool = True
    """Fuse bias and GELU."""

    bias_swiglu_fusion: bool = True
    """Fuse bias and SwiGLU."""

    bias_dropout_fusion: bool = True
    """Fuse bias, dropout and residual."""

    rope_fusion: bool = True
    """Fuse the rotary embedding."""

    persist_layer_norm: bool = True
    """Use the persistent fused layer norm."""

    gradient_accumulation_fusion: bool = True
    """Accumulate weight gradients inside the GEMM."""

    cross_entropy_loss_fusion: bool = False
    """Use the fused vocabulary-parallel cross entropy."""

    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Implementation of --cross-entropy-loss-fusion."""

    deterministic_mode: bool = False
    """Only kernels that give the same bits for the same input: equal runs write equal checkpoints, to be compared with
    ft diagnose compare. Flags and environments that exclude it are refused."""

    use_cpu_initialization: bool = False
    """Draw the initial weights on the CPU: the same whatever the tensor-parallel size."""

    perform_initialization: bool = flag(True, off="--no-initialization")
    """Draw initial weights (needless where they are loaded anyway)."""

    def __post_init__(self):
        if self.use_flash_attn:
            self.attention_backend = "flash"
        if self.deterministic_mode and self.attention_backend == "flash":
            raise UserError(
                "--deterministic-mode and flash attention exclude each other", "use --attention-backend unfused"
            )
        if self.deterministic_mode and self.cross_entropy_loss_fusion:
            raise UserError(
                "--deterministic-mode and --cross-entropy-loss-fusion exclude each other", "drop one of them"
            )
