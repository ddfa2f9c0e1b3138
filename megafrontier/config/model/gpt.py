"""The options of a GPT's blocks, embedding and head."""

from dataclasses import dataclass, field
from typing import Literal

from megafrontier.config.fields import bounded, count, marked
from megafrontier.config.model.blocks import AttentionConfig, MLPConfig, PredictionConfig
from megafrontier.config.model.moe import MoEConfig
from megafrontier.config.model.rotary import RotaryScalingConfig
from megafrontier.config.model.scaling import ScalingConfig

MOST_LAYERS = 10_000


@dataclass
class ModelConfig:
    layers: int = count(12, at_most=MOST_LAYERS)
    """Number of transformer blocks."""
    hidden: int = count(768, at_most=2**20)
    """Width of the residual stream."""
    heads: int = count(12, at_most=2**14)
    """Query heads. Must divide `hidden` unless `head_size` is given."""
    kv_heads: int | None = count(None, at_most=2**14)
    """Key and value heads (grouped-query attention). Must divide `heads`. Default: `heads`."""
    head_size: int | None = count(None, at_most=2**14)
    """Width of one head. Default: hidden / heads."""
    ffn_hidden: int | None = count(None, at_most=2**22)
    """Width inside the MLP. Default: 4 · hidden; with a gate 8/3 · hidden, rounded up to 64."""
    sequence_length: int = count(1024, "samples")
    """Tokens in one sequence."""
    vocab_size: int = count(50304, at_most=2**26)
    """Number of token ids, at least the tokenizer's without special tokens added at its end."""
    vocab_multiple: int = count(128, "ignore", 2**20)  # the padded size is a shape
    """The embedding's rows are padded to a multiple of this. Padded ids are never predicted."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization around attention and MLP, and before the head."""
    norm_eps: float = bounded(1e-5, above=0)
    """Epsilon of the normalization."""
    norm_position: Literal["before", "after", "both"] = "before"
    """Where attention and MLP are normalized: their input, their output before the residual sum
    (OLMo-2), or both (Gemma 2 and 3)."""
    norm_unit_offset: bool = False
    """RMS norms, those of queries and keys too, multiply by 1 + weight (Gemma, Qwen3-Next). Weights
    are initially 0. Not those of the results of delta attention."""
    norm_bias: bool = True
    """Biases of layer norms."""
    activation: Literal[
        "gelu", "gelu_tanh", "relu2", "swiglu", "swiglu_clipped", "geglu", "geglu_tanh"
    ] = "gelu"
    """Activation of the MLP. All but gelu, gelu_tanh and relu2 have a gate. relu2: the square of
    ReLU. swiglu_clipped: (up + 1) · gate · sigmoid(1.702 · gate), with the gate at most 7 and up
    between -7 and 7 (gpt-oss)."""
    position: Literal["learned", "rotary"] = "learned"
    """Learned absolute positions (GPT-2) or rotary positions (GPT-NeoX, Llama)."""
    rotary_fraction: float = 1.0
    """Fraction of each head that rotates, in (0, 1]. GPT-NeoX uses 0.25."""
    rotary_base: float = bounded(10000.0, "warn", above=0)
    """Base of the rotary frequencies."""
    rotary_scaling: RotaryScalingConfig | None = marked(None, "warn")
    """Scaling of the rotary frequencies for longer texts, such as in Llama 3.1 and 3.2."""
    parallel_residual: bool = False
    """Attention and MLP run in parallel on the same residual (GPT-NeoX)."""
    tie_embeddings: bool = False
    """The head uses the embedding's matrix (GPT-2)."""
    bias: bool = True
    """Biases in the linear layers of the blocks."""
    qkv_bias: bool | None = None
    """Biases in the projections of queries, keys and values (Qwen2). Default: `bias`."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of queries and keys before the rotation: of each head (Qwen3), or of all heads
    together (OLMoE)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Further options of attention."""
    mlp: MLPConfig = field(default_factory=MLPConfig)
    """Further options of the MLP."""
    scale_embedding: bool = False
    """Multiply the embedding's output by sqrt(hidden) (Gemma)."""
    logit_softcap: float | None = bounded(None, above=0)
    """Logits become logit_softcap · tanh(logit / logit_softcap) (Gemma 2: 30)."""
    dropout: float = bounded(0.0, "report", at_least=0, below=1)
    """Dropout after the embedding, on attention weights and before each residual sum."""
    init: Literal["gpt2", "neox"] = marked("gpt2", "ignore")
    """gpt2: normal(0, init_std), output projections divided by sqrt(2 · layers). neox: normal(0,
    sqrt(2 / (5 · hidden))), output projections normal(0, 2 / (layers · sqrt(hidden)))."""
    init_std: float = bounded(0.02, "ignore", above=0)
    """Standard deviation of `init: gpt2`, and of learned positions with either."""
    moe: MoEConfig | None = None
    """A mixture of experts in place of the MLP."""
    prediction: PredictionConfig | None = None
    """Also predict the token after the next one in training, with one more block."""
    scaling: ScalingConfig | None = None
    """Scale initial values, the forward pass and values of the optimizer with the model's size, so
    that a learning rate tuned on a small base model is good for a large one. `init_std` and the
    keys of `optimizer` are then those of the base model. null: no scaling."""

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys: `head_size`, or its default."""
        if self.attention.latent is not None:
            return self.attention.latent.head_size
        return self.head_size or self.hidden // self.heads

    @property
    def value_dim(self) -> int:
        """Width of a head of values."""
        latent = self.attention.latent
        return self.head_dim if latent is None else latent.value_size

    @property
    def num_kv_heads(self) -> int:
        """`kv_heads`, or its default."""
        return self.kv_heads or self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """`qkv_bias`, or its default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_out_bias(self) -> bool:
        """`attention.out_bias`, or its default."""
        return self.bias if self.attention.out_bias is None else self.attention.out_bias

    @property
    def has_mlp_bias(self) -> bool:
        """`mlp.bias`, or its default."""
        return self.bias if self.mlp.bias is None else self.mlp.bias

    @property
    def trained_layers(self) -> int:
        """`layers`, and the block of `prediction`."""
        return self.layers + (self.prediction is not None)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation not in ("gelu", "gelu_tanh", "relu2")

    def window_of(self, block: int) -> int | None:
        """The window of a block, counted from 0, or None if it attends to all earlier tokens."""
        every = self.attention.global_every
        return None if every is not None and (block + 1) % every == 0 else self.attention.window

    def has_rotary(self, block: int) -> bool:
        """Whether a block, counted from 0, has rotary positions."""
        every = self.attention.no_rotary_every
        return self.position == "rotary" and (every is None or (block + 1) % every != 0)

    def norm_position_of(self, block: int) -> str:
        """Where attention and MLP of a block, counted from 0, are normalized."""
        delta, kind = self.attention.delta, self.attention.kind_of(block)
        own = delta.norm_position if delta is not None and kind == "delta" else None
        return own or self.norm_position

    @property
    def rotary_dims(self) -> int:
        """Number of rotating dimensions in a head; 0 with learned positions."""
        if self.attention.latent is not None:
            return self.attention.latent.rope_size
        return 0 if self.position == "learned" else round(self.head_dim * self.rotary_fraction)

    @property
    def mlp_hidden(self) -> int:
        """`ffn_hidden`, or its default. With a gate, both it and the up projection have this width.

        The default with a gate keeps the parameter count of a 4 · hidden MLP (Shazeer 2020,
        arXiv:2002.05202).
        """
        gated = -(-8 * self.hidden // (3 * 64)) * 64
        return self.ffn_hidden or (gated if self.is_gated else 4 * self.hidden)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output matrix."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
