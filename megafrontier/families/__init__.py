"""The Hugging Face families that a GPT can be exported to and imported from.

CONTRIBUTING.md says how to add a family.
"""

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.families.base import Constraint, Family, HFConfigReader
from megafrontier.families.gemma import Gemma2, Gemma3
from megafrontier.families.gpt2 import GPT2
from megafrontier.families.hybrid import Qwen3Next, Qwen35, Qwen35MoE
from megafrontier.families.llama import Llama, Ministral3, Mistral, SmolLM3
from megafrontier.families.mixtures.deepseek import DeepseekV2, DeepseekV3
from megafrontier.families.mixtures.experts import Mixtral, OLMoE, Qwen2MoE, Qwen3MoE
from megafrontier.families.mixtures.gpt_oss import GptOss
from megafrontier.families.mixtures.grouped import GLM4MoE
from megafrontier.families.neox import NeoX, StableLM
from megafrontier.families.olmo import OLMo2, OLMo3, OlmoHybrid
from megafrontier.families.phi import Phi3
from megafrontier.families.qwen import Qwen2, Qwen3

_DENSE: tuple[Family, ...] = (
    DeepseekV3(),
    GPT2(),
    OlmoHybrid(),
    Qwen35(),
    Llama(),
    NeoX(),
    Qwen2(),
    Qwen3(),
    Mistral(),
    Ministral3(),
    Gemma2(),
    Gemma3(),
    OLMo2(),
    OLMo3(),
    SmolLM3(),
    StableLM(),
    Phi3(),
)
_MIXTURES: tuple[Family, ...] = (
    GptOss(),
    DeepseekV2(),
    DeepseekV3(),
    GLM4MoE(),
    Qwen3Next(),
    Qwen35MoE(),
    OLMoE(),
    Qwen3MoE(),
    Qwen2MoE(),
    Mixtral(),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*_DENSE, *_MIXTURES)}
"""By `model_type`. A model that several families can express is exported as the first of them."""


def family_for(config: ModelConfig) -> Family:
    """The family that can express this model.

    Raises UserError naming the key and value that the nearest family cannot express.
    """
    families = _DENSE if config.moe is None else _MIXTURES
    found = next((family for family in families if not _violated(family, config)), None)
    if found is not None:
        return found
    nearest = next(family for family in families if family.matches(config))
    constraint = _violated(nearest, config)[0]
    allowed = " or ".join(str(value) for value in constraint.allowed)
    raise UserError(
        f"model.{constraint.key}: {constraint.value} cannot be exported: with position "
        f"{config.position} the nearest family is {nearest.architecture}, which needs {allowed}"
    )


def _violated(family: Family, config: ModelConfig) -> list[Constraint]:
    return [c for c in family.constraints(config) if c.value not in c.allowed]


def family_of(reader: HFConfigReader) -> Family:
    """The family that a config.json names. Raises UserError for an unknown one."""
    return FAMILIES[reader.one_of("model_type", None, *sorted(FAMILIES))]
