"""Sizes that a ModelConfig implies but does not spell out."""

from megafrontier.config import ModelConfig


def head_size(config: ModelConfig) -> int:
    """Width of one attention head."""
    return config.head_size or config.hidden // config.heads


def kv_heads(config: ModelConfig) -> int:
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    return config.kv_heads or config.heads


def rotary_size(config: ModelConfig) -> int:
    """Dimensions of each head that rotate; 0 with learned positions."""
    if config.position == "learned":
        return 0
    return round(head_size(config) * config.rotary_fraction)


def ffn_hidden(config: ModelConfig) -> int:
    """Width inside the MLP (of the gate and of the up projection alike with swiglu).

    The swiglu default keeps the parameters of a 4 · hidden MLP (Shazeer 2020, arXiv:2002.05202),
    rounded up to 64 for the matrix units.
    """
    if config.ffn_hidden is not None:
        return config.ffn_hidden
    if config.activation == "swiglu":
        return -(-8 * config.hidden // (3 * 64)) * 64
    return 4 * config.hidden


def padded_vocab(config: ModelConfig) -> int:
    """Rows of the embedding and output matrices: `vocab_size` up to `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
