"""Mixtures with groups of experts and shared experts after the first blocks, as in DeepSeek-V3 and
GLM-4.5."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from megafrontier.config import ExpertGroupsConfig, ModelConfig, MoEConfig, PredictionConfig
from megafrontier.families.base import (
    Constraint,
    HFConfigReader,
    ParamMapping,
    same,
    written_part_rope,
)
from megafrontier.families.llama import gated_mlp
from megafrontier.families.mixtures.experts import (
    LlamaExperts,
    expert_biases,
    expert_width,
    experts_of,
)
from megafrontier.model.moe.layer import has_experts


class GroupedExperts(LlamaExperts):
    """What the families have in common: experts are chosen by sigmoids and biases, and one more
    block may predict the token after the next one."""

    count_key = "n_routed_experts"
    router: Literal["softmax", "sigmoid"] = "sigmoid"
    balances: tuple[str, ...] = ("bias",)
    normalises: tuple[bool, ...] = (True, False)
    best = 2
    """Scores of a group of experts that are summed."""
    has_prediction = True

    def routing(self, moe: MoEConfig) -> list[Constraint]:
        """The routing, and shared experts without a gate in every block but the first ones."""
        best = moe.groups.best if moe.groups.active < moe.groups.number else self.best
        return [
            *expert_biases(moe, False),
            Constraint("moe.router", moe.router, (self.router,)),
            Constraint("moe.balance", moe.balance, self.balances),
            Constraint("moe.normalise", moe.normalise, self.normalises),
            Constraint("moe.groups.best", best, (self.best,)),
            Constraint("moe.every", moe.every, (1,)),
            Constraint("moe.shared_experts", moe.shared_experts > 0, (True,)),
            Constraint("moe.shared_gate", moe.shared_gate, (False,)),
        ]

    def expert_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of experts."""
        moe = experts_of(config)
        return {
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared_experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": expert_width(config),
            "routed_scaling_factor": moe.scale,
            "norm_topk_prob": moe.normalise,
            "n_group": moe.groups.number,
            "topk_group": moe.groups.active,
        }

    def prediction(self, reader: HFConfigReader) -> PredictionConfig | None:
        """The prediction of the token after the next one."""
        predicts = self.has_prediction and reader.number("num_nextn_predict_layers", 0) == 1
        return PredictionConfig() if predicts else None

    def experts(self, reader: HFConfigReader) -> MoEConfig:
        """The experts."""
        return replace(
            self._experts(reader),
            router="sigmoid",
            balance="bias",
            normalise=reader.flag("norm_topk_prob", True),
            groups=self._groups(reader),
        )

    def _experts(self, reader: HFConfigReader) -> MoEConfig:
        number = partial(self.number, reader)
        return MoEConfig(
            experts=number("n_routed_experts"),
            active=number("num_experts_per_tok"),
            ffn_hidden=number("moe_intermediate_size"),
            shared_experts=number("n_shared_experts"),
            scale=float(number("routed_scaling_factor")),
        )

    def _groups(self, reader: HFConfigReader) -> ExpertGroupsConfig:
        number, active = (self.number(reader, key) for key in ("n_group", "topk_group"))
        return ExpertGroupsConfig(number, active, self.best)

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """Those of parameters, and the biases of routers."""
        if config.prediction is not None and self.has_prediction:
            return self._with_prediction(config)
        biases = [
            same(f"blocks.{i}.mlp.router.bias", f"layers.{i}.mlp.gate.e_score_correction_bias")
            for i in range(config.layers)
            if has_experts(config, i) and "bias" in self.balances
        ]
        return [*super().mappings(config), *biases]

    def _with_prediction(self, config: ModelConfig) -> list[ParamMapping]:
        """The block of `prediction` comes after the others in files, with copies of the embedding
        and of the head. Its first matrix has the columns of the next token's embedding first."""
        last, hf_name = f"blocks.{config.layers}.", f"layers.{config.layers}"
        copies = {
            "embedding.tokens.weight": (f"{hf_name}.embed_tokens.weight",),
            "head.output.weight": (f"{hf_name}.shared_head.head.weight",),
        }
        deeper = replace(config, layers=config.layers + 1, prediction=None)
        found = [
            replace(
                mapping,
                name=mapping.name.replace(last, "prediction.block."),
                copies=copies.get(mapping.name, ()),
            )
            for mapping in self.mappings(deeper)
        ]
        names = {"token_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
        found += [
            same(f"prediction.{ours}.weight", f"{hf_name}.{theirs}.weight")
            for ours, theirs in names.items()
        ]
        projection = f"{hf_name}.eh_proj.weight"

        def swap(tensor: Tensor) -> Tensor:
            return tensor.roll(config.hidden, 1)

        name = "prediction.projection.weight"
        load = ParamMapping(name, (projection,), lambda t: (swap(t),), lambda ts: swap(ts[0]))
        return [*found, load]

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of experts, and of the shared ones."""
        found = super().mlp_mappings(config, block)
        if config.moe is not None and has_experts(config, block):
            name, hf_name = f"blocks.{block}.mlp.shared", f"layers.{block}.mlp.shared_experts"
            found += gated_mlp(name, hf_name, config.moe.shared_experts * expert_width(config))
        return found


class GLM4MoE(GroupedExperts):
    """`Glm4MoeForCausalLM`, of GLM-4.5, 4.6 and 4.7."""

    architecture = "Glm4MoeForCausalLM"
    model_type = "glm4_moe"
    rotating = 0.5
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "vocab_size": 151552,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }

    def matches(self, config: ModelConfig) -> bool:
        """A router with sigmoids."""
        return config.moe is not None and config.moe.router == self.router

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Norms of each head's queries and keys or none, and biases of projections to queries, keys
        and values alone."""
        more: dict[str, Sequence[Any] | None] = {
            "qk_norm": ("none", "head"),
            "rotary_fraction": None,
            "qkv_bias": None,
            "attention.out_bias": (False,),
            "mlp.bias": (False,),
            "moe": None,
        }
        return [*self._constraints(config, more), *self.routing(experts_of(config))]

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Those of experts, the norms and biases of attention, and the rotating fraction."""
        own = {
            "first_k_dense_replace": experts_of(config).first,
            "num_nextn_predict_layers": int(config.prediction is not None),
            "use_qk_norm": config.qk_norm == "head",
            "attention_bias": config.has_qkv_bias,
        }
        return self.expert_keys(config) | own | written_part_rope(config)

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read the keys, with the family's defaults."""
        reader.one_of("mlp_bias", False, False)
        model, first = self._read_common(reader, bias=False), self.number(reader, _FIRST)
        if first >= model.layers:
            raise reader.error(_FIRST, first, f"need less than num_hidden_layers ({model.layers})")
        return replace(
            model,
            qkv_bias=reader.flag("attention_bias", False),
            qk_norm="head" if reader.flag("use_qk_norm", False) else "none",
            moe=replace(self.experts(reader), first=first),
            prediction=self.prediction(reader),
        )


_FIRST = "first_k_dense_replace"
