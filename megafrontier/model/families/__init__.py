"""The Hugging Face families that a GPT can be exported to and imported from.

To add a family, write one file like `gpt2.py` and add it to FAMILIES.
"""

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.families.base import Family, HFConfigReader
from megafrontier.model.families.experts import Mixtral, OLMoE, Qwen2MoE, Qwen3MoE
from megafrontier.model.families.gpt2 import GPT2
from megafrontier.model.families.llama import Llama
from megafrontier.model.families.neox import NeoX

_ALL = (GPT2(), Llama(), NeoX(), OLMoE(), Qwen3MoE(), Qwen2MoE(), Mixtral())
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""By `model_type`."""


def family_for(config: ModelConfig) -> Family:
    """The family that can express this model.

    Raises UserError naming the key and value that the nearest family cannot express.
    """
    family = next(family for family in FAMILIES.values() if family.matches(config))
    for constraint in family.constraints(config):
        if constraint.value not in constraint.allowed:
            allowed = " or ".join(str(value) for value in constraint.allowed)
            raise UserError(
                f"model.{constraint.key}: {constraint.value} cannot be exported: with position "
                f"{config.position} the nearest family is {family.architecture}, which needs "
                f"{allowed}"
            )
    return family


def family_of(reader: HFConfigReader) -> Family:
    """The family that a config.json names. Raises UserError for an unknown one."""
    return FAMILIES[reader.one_of("model_type", None, *sorted(FAMILIES))]
