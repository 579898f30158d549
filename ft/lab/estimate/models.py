"""Shapes of published transformer models for ``ft dmr estimate``, with their numbers of parameters and FLOPs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """A mixture of experts that replaces every MLP: experts of a layer, experts that a token is routed to, and the
    width of the expert that every token visits, 0 for none. Routed experts have the width ``Model.ffn``."""

    count: int
    active: int
    shared: int


@dataclass(frozen=True)
class Model:
    """A decoder with RMS norms, grouped-query attention, and an embedding separate from the output layer unless
    ``tied``.

    Attributes:
        head: size of a head.
        ffn: width of the MLP, or of one expert.
        sequence: tokens of a training sequence.
        experts: the mixture of experts, or None.
        gated: whether the MLP has a third matrix (SwiGLU).
        causal: whether FLOPs of attention are counted for the lower triangle of the scores only; older publications
            count the full matrix.
        tied: whether the output layer uses the embedding's weight.
        source: where the shape is published.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    sequence: int
    experts: Experts | None = None
    gated: bool = True
    causal: bool = True
    tied: bool = False
    source: str = ""

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        if self.experts is None:
            return attention + self._mlp(self.ffn) + 2 * self.hidden
        routed = self.experts.count * (self._mlp(self.ffn) + self.hidden)
        return attention + self._mlp(self.experts.shared) + routed + 2 * self.hidden

    def _mlp(self, width: int) -> int:
        """Return the number of parameters of an MLP or expert of a width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters + ends

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that process one token."""
        if self.experts is None:
            return self.parameters
        asleep = (self.experts.count - self.experts.active) * self._mlp(self.ffn)
        return self.parameters - self.layers * asleep

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward per token, in matrix products and attention.

        The count is 6 for each parameter except those of the embedding (a table lookup), plus 12 * hidden * sequence
        for the attention of each layer, or half of this if attention is causal: Narayanan et al. 2021 (arXiv
        2104.04473), appendix.
        """
        norms = self.layers * 2 * self.hidden + self.hidden
        output = self.embedding_parameters
        matrices = self.active_parameters - norms - output * (1 if self.tied else 2)
        attention = self.layers * 2 * self.heads * self.head * self.sequence * (0.5 if self.causal else 1.0)
        return 6 * (matrices + attention) + 6 * output


_LLAMA3 = "Llama 3 Herd of Models (arXiv 2407.21783), table 3"
_MISTRAL = "config.json of Mistral-Large-Instruct-2407"
_SCOUT = "config.json of Llama-4-Scout-17B-16E (text model; the 0.9 billion of the vision encoder are left out)"
_GPT3 = "Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1, without positions and biases"
_GPT3_SHAPE = {"gated": False, "causal": False, "tied": True}
_ALL = (
    # name, layers, hidden size, heads, key-value heads, size of a head, width, vocabulary, tokens of a sequence
    Model("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, source=_LLAMA3),
    Model("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, source=_LLAMA3),
    Model("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256, 8192, source=_LLAMA3),
    Model("mistral-large-123b", 88, 12288, 96, 8, 128, 28672, 32768, 8192, source=_MISTRAL),
    Model("llama4-scout", 48, 5120, 40, 8, 128, 8192, 202048, 8192, Experts(16, active=1, shared=8192), source=_SCOUT),
    Model("gpt3-175b", 96, 12288, 96, 96, 128, 49152, 51200, 2048, **_GPT3_SHAPE, source=_GPT3),
)
MODELS = {model.name: model for model in _ALL}
