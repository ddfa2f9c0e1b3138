"""The Hugging Face families that a GPT can be written as and read from."""

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.families.base import Family, Settings
from megafrontier.model.families.gpt2 import GPT2
from megafrontier.model.families.llama import Llama
from megafrontier.model.families.neox import NeoX

FAMILIES: tuple[Family, ...] = (GPT2(), NeoX(), Llama())


def family_for(config: ModelConfig) -> Family:
    """The family that can express this model.

    Raises UserError naming the key and value that the nearest family cannot express.
    """
    gpt2, neox, llama = FAMILIES
    if config.position == "learned":
        family = gpt2
    else:
        gated = config.norm == "rmsnorm" or config.activation == "swiglu"
        family = llama if gated else neox
    for need in family.needs(config):
        if need.value not in need.fits:
            fits = " or ".join(str(fit) for fit in need.fits)
            raise UserError(
                f"model.{need.key}: {need.value} cannot be exported: with position "
                f"{config.position} the nearest family is {family.architecture}, which needs {fits}"
            )
    return family


def family_of(settings: Settings) -> Family:
    """The family that a config.json names. Raises UserError when it is none of ours."""
    known = {family.model_type: family for family in FAMILIES}
    return known[settings.one_of("model_type", None, *known)]


__all__ = ["FAMILIES", "Family", "Settings", "family_for", "family_of"]
