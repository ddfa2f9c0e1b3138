"""The options of attention and of the MLP beyond those in `ModelConfig`."""

from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from megafrontier.common.errors import need
from megafrontier.config.fields import bounded, count


@dataclass
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values of all
    heads come from one narrow latent of the token, and queries may, too. Latents have RMS norms.
    Heads of queries and keys have a rotary part, which all heads of keys share, and another one."""

    query: int | None = count(None, at_most=2**20)
    """Width of the latent of queries (q_lora_rank). null: none, they come from the hidden state."""
    key_value: int = count(512, at_most=2**20)
    """Width of the latent of keys and values (kv_lora_rank)."""
    rope_size: int = count(64, at_most=2**14)
    """Dimensions of a head of queries and keys that rotate (qk_rope_head_dim)."""
    nope_size: int = count(128, at_most=2**14)
    """Dimensions that do not rotate (qk_nope_head_dim)."""
    value_size: int = count(128, at_most=2**14)
    """Width of a head of values (v_head_dim). At most `rope_size` + `nope_size`."""

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        return self.rope_size + self.nope_size


@dataclass
class DeltaConfig:
    """Gated delta attention (Yang et al. 2024, arXiv:2412.06464): each head has a state, a matrix
    that each token decays and corrects. Queries, keys and values go through a short causal
    convolution, and queries and keys are normalized."""

    key_heads: int = count(16, at_most=2**14)
    """Heads of queries and keys."""
    value_heads: int = count(32, at_most=2**14)
    """Heads of values, each with a state. A multiple of `key_heads`."""
    key_size: int = count(128, at_most=2**14)
    """Width of a head of queries and keys, the rows of a state."""
    value_size: int = count(128, at_most=2**14)
    """Width of a head of values, the columns of a state."""
    convolution: int = count(4, at_most=2**10)
    """Tokens of the convolution: a token and those directly before it."""
    negative_eigenvalues: bool = False
    """Tokens correct a state up to twice as much, so that it can also change its sign (Grazzi et
    al. 2024, arXiv:2411.12537; Olmo Hybrid)."""
    norm_position: Literal["before", "after", "both"] | None = None
    """Where attention and MLP of these blocks are normalized (Olmo Hybrid: before, with
    `model.norm_position: after`). Default: `model.norm_position`."""
    norm_eps: float | None = bounded(None, above=0)
    """Epsilon of the norm of each head's result. Default: `model.norm_eps`."""

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Widths of all heads of queries, of keys and of values, which the convolution mixes."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


@dataclass
class AttentionConfig:
    """Which tokens attend to which, and how their scores are computed."""

    window: int | None = count(None)
    """Tokens that a token attends to: itself and those directly before it (sliding window). null:
    all before it. Other documents are masked as without a window."""
    global_every: int | None = count(None)
    """With `window`: every how many blocks one attends to all tokens before it, the last of so
    many: 2 (Gemma 2), 6 (Gemma 3). null: none does (Mistral)."""
    window_rotary_base: float | None = bounded(None, above=0)
    """Base of the rotary frequencies in blocks with a window (Gemma 3). They then have no
    `model.rotary_scaling`. Default: `model.rotary_base`."""
    no_rotary_every: int | None = count(None)
    """Every how many blocks one has no rotary positions, the last of so many (SmolLM3: 4)."""
    scale: float | None = bounded(None, above=0)
    """Factor of scores before the softmax (Gemma: query_pre_attn_scalar ** -0.5). Default:
    1 / sqrt(head size)."""
    softcap: float | None = bounded(None, above=0)
    """Scores become softcap · tanh(score / softcap) (Gemma 2: 50)."""
    sinks: bool = False
    """A learned logit for each head that takes part in the softmax and has no value (gpt-oss)."""
    output_gate: bool = False
    """Multiply each head's result by a sigmoid of the token, element by element (Qwen3-Next)."""
    out_bias: bool | None = None
    """Bias in the output projection. Default: `model.bias`."""
    latent: LatentConfig | None = None
    """Multi-head latent attention. The size of heads is then given here."""
    pattern: list[Literal["delta", "full"]] = field(default_factory=list)
    """The kinds of attention of the first blocks, which repeat: [delta, delta, delta, full]
    (Qwen3-Next). full: as the other options say. Empty: full in all blocks."""
    delta: DeltaConfig | None = None
    """Gated delta attention, in the blocks of `pattern`."""

    def kind_of(self, block: int) -> str:
        """The kind of attention of a block, counted from 0: a name in `model.attention.kinds`."""
        if self.pattern and self.pattern[block % len(self.pattern)] == "delta":
            return "delta"
        return "softmax" if self.latent is None else "latent"

    @property
    def period(self) -> int:
        """After how many blocks kinds of attention, windows and rotary positions repeat."""
        return lcm(self.global_every or 1, self.no_rotary_every or 1, len(self.pattern) or 1)

    @property
    def has_rule(self) -> bool:
        """Whether attention is more than a causal softmax, in some block."""
        return self.window is not None or self.softcap is not None or self.sinks


@dataclass
class MLPConfig:
    """The MLP. Its width and activation are `model.ffn_hidden` and `model.activation`."""

    bias: bool | None = None
    """Biases in its linear layers. Default: `model.bias`."""


@dataclass
class PredictionConfig:
    """Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): in training, one
    more block predicts the token after the next one, from the last hidden state and the embedding
    of the next token, with the same head. Evaluation, generation and exports do without it."""

    coefficient: float = bounded(0.3, "report", above=0)
    """Factor of its cross-entropies. They are added to those of the next tokens in the gradient;
    `loss` in the metrics does not have them, and `prediction_loss` is their mean."""


def check_attention(attention: AttentionConfig, layers: int, rotary: bool, dropout: float) -> None:
    """Check how the values fit each other. Raises UserError with key, value and fix.

    rotary: whether positions are rotary.
    """
    key, delta = "model.attention", attention.delta
    if delta is not None:
        fits = f"need a multiple of {key}.delta.key_heads ({delta.key_heads})"
        is_multiple = delta.value_heads % delta.key_heads == 0
        need(is_multiple, f"{key}.delta.value_heads", delta.value_heads, fits)
    has_both = (delta is None) == ("delta" not in attention.pattern)
    fits = f"need delta in it with {key}.delta, and only then"
    need(has_both, f"{key}.pattern", attention.pattern, fits)
    fits = f"need at most model.layers ({layers}) of them"
    need(len(attention.pattern) <= layers, f"{key}.pattern", attention.pattern, fits)
    fits = "need null, or model.attention.window"
    for name in ("global_every", "window_rotary_base"):
        value = getattr(attention, name)
        need(value is None or attention.window is not None, f"{key}.{name}", value, fits)
    for name in ("global_every", "no_rotary_every"):
        value = getattr(attention, name)
        fits = f"need at most model.layers ({layers})"
        need(value is None or value <= layers, f"{key}.{name}", value, fits)
    for name in ("window_rotary_base", "no_rotary_every"):
        value = getattr(attention, name)
        fits = "need null, or model.position=rotary"
        need(value is None or rotary, f"{key}.{name}", value, fits)
    for name in ("window", "softcap", "sinks"):
        is_off = not getattr(attention, name)
        need(is_off or dropout == 0, "model.dropout", dropout, f"need 0 with {key}.{name}")
