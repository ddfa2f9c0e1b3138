"""The options of a GPT's blocks, embedding and head."""

from dataclasses import dataclass
from typing import Literal

from megafrontier.config.fields import bounded, count
from megafrontier.config.model.moe import MoEConfig
from megafrontier.config.model.scaling import ScalingConfig


@dataclass
class RotaryScalingConfig:
    """Llama 3's scaling of rotary frequencies. Those between the two bounds are interpolated."""

    factor: float = bounded(8.0, at_least=1)
    """How many times longer the texts are than those of the original training."""
    low_frequency: float = bounded(1.0, above=0)
    """Frequencies with fewer turns than this within `original_length` are divided by `factor`."""
    high_frequency: float = 4.0
    """Frequencies with more turns than this within `original_length` are kept."""
    original_length: int = bounded(8192, at_least=1)
    """Sequence length of the original training, in tokens."""


@dataclass
class ModelConfig:
    layers: int = count(12)
    """Number of transformer blocks."""
    hidden: int = count(768)
    """Width of the residual stream."""
    heads: int = count(12)
    """Query heads. Must divide `hidden` unless `head_size` is given."""
    kv_heads: int | None = count(None)
    """Key and value heads (grouped-query attention). Must divide `heads`. Default: `heads`."""
    head_size: int | None = count(None)
    """Width of one head. Default: hidden / heads."""
    ffn_hidden: int | None = count(None)
    """Width inside the MLP. Default: 4 · hidden; with swiglu 8/3 · hidden, rounded up to 64."""
    sequence_length: int = count(1024)
    """Tokens in one sequence."""
    vocab_size: int = count(50304)
    """Number of token ids, at least the tokenizer's without special tokens added at its end."""
    vocab_multiple: int = count(128)
    """The embedding's rows are padded to a multiple of this. Padded ids are never predicted."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization before attention, MLP and head."""
    norm_eps: float = bounded(1e-5, above=0)
    """Epsilon of the normalization."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Activation of the MLP."""
    position: Literal["learned", "rotary"] = "learned"
    """Learned absolute positions (GPT-2) or rotary positions (GPT-NeoX, Llama)."""
    rotary_fraction: float = 1.0
    """Fraction of each head that rotates, in (0, 1]. GPT-NeoX uses 0.25."""
    rotary_base: float = bounded(10000.0, above=0)
    """Base of the rotary frequencies."""
    rotary_scaling: RotaryScalingConfig | None = None
    """Scaling of the rotary frequencies for longer texts, as in Llama 3.1 and 3.2."""
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
    dropout: float = bounded(0.0, at_least=0, below=1)
    """Dropout after the embedding, on attention weights and before each residual sum."""
    init: Literal["gpt2", "neox"] = "gpt2"
    """gpt2: normal(0, init_std), output projections divided by sqrt(2 · layers). neox: normal(0,
    sqrt(2 / (5 · hidden))), output projections normal(0, 2 / (layers · sqrt(hidden)))."""
    init_std: float = bounded(0.02, above=0)
    """Standard deviation of `init: gpt2`, and of learned positions with either."""
    moe: MoEConfig | None = None
    """A mixture of experts in place of the MLP."""
    scaling: ScalingConfig | None = None
    """Scale initial values, the forward pass and values of the optimizer with the model's size, so
    that a learning rate tuned on a small base model is good for a large one. `init_std` and the
    keys of `optimizer` are then those of the base model. null: no scaling."""

    @property
    def head_dim(self) -> int:
        """`head_size`, or its default."""
        return self.head_size or self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """`kv_heads`, or its default."""
        return self.kv_heads or self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """`qkv_bias`, or its default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def rotary_dims(self) -> int:
        """Number of rotating dimensions in a head; 0 with learned positions."""
        return 0 if self.position == "learned" else round(self.head_dim * self.rotary_fraction)

    @property
    def mlp_hidden(self) -> int:
        """`ffn_hidden`, or its default. With swiglu, both the gate and the up projection have it.

        The default for swiglu keeps the parameter count of a 4 · hidden MLP (Shazeer 2020,
        arXiv:2002.05202).
        """
        swiglu = -(-8 * self.hidden // (3 * 64)) * 64
        return self.ffn_hidden or (swiglu if self.activation == "swiglu" else 4 * self.hidden)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output matrix."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
