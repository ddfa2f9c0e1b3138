"""The options of scaled rotary positions."""

from dataclasses import dataclass
from typing import Literal

from megafrontier.common.errors import need
from megafrontier.config.fields import bounded


@dataclass
class RotaryScalingConfig:
    """Scaling of rotary frequencies for longer texts. With llama3 and yarn, frequencies between
    the two bounds are interpolated."""

    factor: float = bounded(8.0, at_least=1)
    """How many times longer the texts are than those of the original training."""
    low_frequency: float = bounded(1.0, above=0)
    """Frequencies with fewer turns than this within `original_length` are divided by `factor`
    (YaRN's beta_slow)."""
    high_frequency: float | None = bounded(None, above=0)
    """Frequencies with more turns than this within `original_length` are kept (YaRN's beta_fast).
    Default: 4 with llama3, 32 with yarn."""
    original_length: int = bounded(8192, at_least=1)
    """Sequence length of the original training, in tokens."""
    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    """llama3: as Llama 3.1. yarn: Peng et al. 2023, arXiv:2309.00071. linear: all frequencies are
    divided by `factor`, and the other keys are not used."""
    attention_factor: float | None = bounded(None, above=0)
    """yarn: multiplies rotated queries and keys. Default: 0.1 · ln(factor) + 1."""
    query_growth: float = bounded(0.0, at_least=0)
    """yarn: queries at position p are multiplied by 1 + query_growth · ln(1 + floor(p /
    original_length)) (Ministral 3)."""
    truncate: bool = True
    """yarn: round the numbers of the frequencies at the two bounds outwards. gpt-oss: false."""

    @property
    def kept_above(self) -> float:
        """`high_frequency`, or its default."""
        return self.high_frequency or (32.0 if self.kind == "yarn" else 4.0)


def check_rotary_scaling(scaling: RotaryScalingConfig) -> None:
    """Check how the values fit each other. Raises UserError with key, value and fix."""
    key, low, high = "model.rotary_scaling", scaling.low_frequency, scaling.kept_above
    fits = f"need more than {key}.low_frequency ({low})"
    need(high > low, f"{key}.high_frequency", high, fits)
    factor = scaling.attention_factor
    fits = f"need null, or {key}.kind=yarn"
    need(factor is None or scaling.kind == "yarn", f"{key}.attention_factor", factor, fits)
    fits, growth = f"need 0, or {key}.kind=yarn", scaling.query_growth
    need(growth == 0 or scaling.kind == "yarn", f"{key}.query_growth", growth, fits)
    fits = f"need true, or {key}.kind=yarn"
    need(scaling.truncate or scaling.kind == "yarn", f"{key}.truncate", False, fits)
