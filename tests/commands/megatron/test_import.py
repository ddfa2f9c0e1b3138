"""Checkpoints of Megatron core become ours, with the logits of transformers and Adam's states."""

import argparse
import enum
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from megafrontier.checkpoint.format import BUFFER
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.cli import main
from megafrontier.commands.checkpoints import load_model, saved_config
from megafrontier.commands.fine_tuning import write_config
from megafrontier.commands.megatron.arguments import ArgumentReader
from megafrontier.commands.megatron.continued import continued
from megafrontier.config import ModelConfig, OptimizerConfig, ScheduleConfig, load_config
from megafrontier.data.text.prepare import prepare
from tests import runs
from tests.commands.helpers import commands_of
from tests.commands.megatron.layout import Layout, grouped, of_gpt2, of_llama, write
from tests.families.conftest import assert_same_logits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 24,
         "initializer_range": 0.3}  # fmt: skip
COMMON = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
          "kv_channels": 8, "seq_length": 24, "max_position_embeddings": 24, "vocab_size": 61,
          "padded_vocab_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
          "optimizer": "adam", "lr": 0.01, "adam_beta2": 0.95, "weight_decay": 0.1,
          "consumed_train_samples": 40}  # fmt: skip
LLAMA = COMMON | {"group_query_attention": True, "num_query_groups": 2, "swiglu": True,
                  "normalization": "RMSNorm", "norm_epsilon": 1e-6, "add_bias_linear": False,
                  "position_embedding_type": "rope", "rotary_base": 10000,
                  "untie_embeddings_and_output_weights": True}  # fmt: skip
EXPERTS = LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
                   "moe_router_pre_softmax": True, "moe_router_load_balancing_type": "aux_loss",
                   "moe_aux_loss_coeff": 0.01, "moe_shared_expert_intermediate_size": 32,
                   "moe_shared_expert_gate": True, "add_qkv_bias": True}  # fmt: skip
GROUPED = EXPERTS | {"num_experts": 8, "moe_router_topk": 4, "moe_layer_freq": [0, 1],
                     "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4,
                     "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True,
                     "moe_router_topk_scaling_factor": 1.5, "moe_shared_expert_gate": False,
                     "add_qkv_bias": False, "qk_layernorm": True, "rotary_percent": 0.5,
                     "norm_epsilon": 1e-5, "moe_router_pre_softmax": False}  # fmt: skip
TOKENS = torch.arange(48).view(2, 24) * 7 % 61


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_head=4, n_layer=2, n_positions=24, n_inner=48,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    return with_biases(model), of_gpt2(model), COMMON


def with_biases(model):
    """The model with other values than 0 and 1 in vectors, so that each must be in its place."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if parameter.dim() == 1 and "inv_freq" not in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def llama_like(config, arguments, **layout):
    torch.manual_seed(0)
    model = with_biases(transformers.AutoModelForCausalLM.from_config(config).eval())
    return model, of_llama(model, **layout), arguments


def llama(**layout):
    return llama_like(transformers.LlamaConfig(**SIZES), LLAMA, **layout)


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=16, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return llama_like(config, EXPERTS)


def glm4_moe():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = transformers.Glm4MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=4, first_k_dense_replace=1, n_group=4, topk_group=2, use_qk_norm=True,
        routed_scaling_factor=1.5, rope_parameters=rope,
    )  # fmt: skip
    return llama_like(config, GROUPED)


GLM = "mixture after a dense block, a tensor for each"
HEADS = argparse.Namespace(num_key_value_heads=2)
WEIGHTS = {"weight": torch.float32}
CASES = {
    "GPT": (gpt2, Layout(is_gated=False)),
    "Llama, bf16 weights and fp32 masters": (llama, Layout("reshardable", dtype=torch.bfloat16)),
    "mixture, experts in one tensor": (
        qwen2_moe,
        Layout("flattened", chain="chained_1.", old=False, master="param"),
    ),
    GLM: (
        glm4_moe,
        Layout("reshardable", is_stacked=False),
    ),
}


def run_import(folder, out, *options):
    words = ["import", "--megatron", str(folder), "--out", str(out), "--tokenizer", "none"]
    return main([*words, *options])


@pytest.mark.parametrize("case", CASES)
def test_an_import_has_the_logits_of_transformers(case, tmp_path, capsys):
    make, layout = CASES[case]
    theirs, tensors, arguments = make()
    write(tmp_path / "m", tensors, arguments, layout)
    assert run_import(tmp_path / "m", tmp_path / "out") == 0
    path = tmp_path / "out" / ("step-00000005" if layout.optimizer else "step-00000000")
    assert str(path) in capsys.readouterr().out
    config = saved_config(path)
    ours = load_model(path, config, torch.device("cpu")).eval()
    assert_same_logits(ours, theirs, TOKENS)


def test_adams_states_are_imported_by_name_and_go_on_from_the_iteration(tmp_path):
    """In the order of our rows: queries, keys and values are not in groups."""
    _, tensors, arguments = glm4_moe()
    states = write(tmp_path / "m", tensors, arguments, CASES[GLM][1])
    run_import(tmp_path / "m", tmp_path / "out")
    found = open_checkpoint(tmp_path / "out" / "step-00000005")
    manifest = found.manifest
    assert manifest.step == 5
    assert manifest.tokens == 40 * 24
    assert manifest.extra["optimizer_steps"] == 7
    assert saved_config(found.path).optimizer.betas == (0.9, 0.95)
    names = {
        "blocks.1.mlp.experts.up": "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "blocks.0.mlp.up.weight": "decoder.layers.0.mlp.linear_fc1.weight",
        "blocks.1.norm2.weight": "decoder.layers.1.pre_mlp_layernorm.weight",
        "head.norm.weight": "decoder.final_layernorm.weight",
    }
    for state, by_name in states.items():
        for ours, theirs in names.items():
            assert torch.equal(found.tensor(state, ours), by_name[theirs])
        qkv = found.tensor(state, "blocks.1.attention.qkv.weight").split([32, 16, 16])
        theirs = by_name["decoder.layers.1.self_attention.linear_qkv.weight"]
        assert torch.equal(grouped(*qkv, HEADS), theirs)
        rows = found.tensor(state, "embedding.tokens.weight")
        assert torch.equal(rows[:61], by_name["embedding.word_embeddings.weight"][:61])
        assert not rows[61:].any()
    bias = tensors["decoder.layers.1.mlp.router.expert_bias"]
    assert torch.equal(found.tensor(BUFFER, "blocks.1.mlp.router.bias"), bias)


def test_a_run_goes_on_from_an_import(config_file, tmp_path):
    _, tensors, arguments = llama()
    write(tmp_path / "m", tensors, arguments, Layout("reshardable"))
    run_import(tmp_path / "m", tmp_path / "out")
    config = saved_config(tmp_path / "out" / "step-00000005")
    model = [
        f"model.{key}={getattr(config.model, key)}"
        for key in ("hidden", "heads", "kv_heads", "ffn_hidden", "norm", "norm_eps", "activation",
                    "position", "bias", "layers", "sequence_length", "vocab_size",
                    "vocab_multiple")
    ]  # fmt: skip
    resume = (f"checkpoint.resume={tmp_path}/out", f"run.directory={tmp_path}/run")
    model += ["tokenizer=none", "train.stop_at=7", "train.steps=9"]
    lines = runs.run(config_file, 1, *runs.ONE, *resume, *model)
    assert [line["step"] for line in lines if "loss" in line] == [6, 7]
    saved = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007")
    assert saved.manifest.extra["optimizer_steps"] == 9


RUN = {"train_iters": 9, "global_batch_size": 4, "micro_batch_size": 2, "min_lr": 1e-4,
       "lr_decay_style": "cosine", "lr_decay_iters": 12, "lr_warmup_iters": 2, "clip_grad": 0.5,
       "reset_attention_mask": True}  # fmt: skip


def way_from_megatron():
    """The commands of the page. The corpus and the checkpoint of Megatron's run are written into
    the current folder, and its tokenizer is that of my-hf."""
    shutil.copytree("my-hf", "my-tokenizer")
    config = transformers.LlamaConfig(**SIZES | {"vocab_size": 280})
    _, tensors, arguments = llama_like(config, LLAMA | RUN | {"vocab_size": 280})
    arguments["padded_vocab_size"] = 284
    write(Path("checkpoints/7b"), tensors, arguments, Layout("reshardable", padding=4))
    Path("text.txt").write_text("a stitch in time saves nine\n" * 200)
    prepare(["text.txt"], "my-tokenizer", "corpora/pile_text_document", 1)
    made = commands_of("from-megatron.md", "Megatron's checkpoints")
    assert [words[0] for words in made] == ["import", "train"]
    return made


def test_the_commands_of_the_page_go_on_with_megatrons_run(my_hf, capfd):
    for words in way_from_megatron():
        assert main(words) == 0
    run = Path("runs/7b")
    assert capfd.readouterr().out.startswith(f"{run}/step-00000005\n")
    assert [line["step"] for line in runs.metrics(run) if "loss" in line] == [6, 7, 8, 9]
    given = load_config(run / "config.given.yaml")
    assert given.optimizer == replace(
        OptimizerConfig(), lr=0.01, betas=(0.9, 0.95), no_decay=["norm", "bias"]
    )
    assert given.schedule == ScheduleConfig("cosine", 2, decay_steps=12, min_lr=1e-4)
    assert given.train.clip_grad_norm == 0.5
    assert given.data.document_mask


STYLES = {
    "linear": {},
    "constant": {"lr_decay_iters": None, "lr_warmup_fraction": 0.5},
    "WSD": {"lr_wsd_decay_iters": 3},
    "inverse-square-root": {"train_iters": 5, "recompute_granularity": "full", "bf16": True},
}


def test_a_config_has_what_the_arguments_of_a_run_say(tmp_path):
    found = {}
    for style, more in STYLES.items():
        reader = ArgumentReader(
            "args", RUN | {"lr_decay_style": style, "lr_warmup_iters": 0} | more
        )
        lines = continued(reader, 5, OptimizerConfig())
        write_config(tmp_path / "step-00000005", ModelConfig(), False, lines)
        overrides = ["model.preset=gpt2"]  # the checkpoint is not there
        found[style] = load_config(tmp_path / "config.yaml", overrides)
    schedules = [found[style].schedule for style in STYLES]
    names = [schedule.name for schedule in schedules]
    assert names == ["linear", "constant", "wsd", "cosine"]
    assert [schedule.warmup_steps for schedule in schedules] == [0, 4, 0, 0]
    assert [schedule.decay_steps for schedule in schedules] == [12, None, 12, 12]
    assert found["WSD"].schedule.decay_fraction == 0.25
    last = found["inverse-square-root"].train
    assert (last.steps, last.precision, last.activation_checkpointing) == (305, "bf16", "block")
    assert found["linear"].train.steps == 9


def refused(folder, out, capsys, *options):
    """The line with which an import ends, and nothing is left in `out`."""
    assert run_import(folder, out, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not out.exists()
    return line


def test_flat_buckets_are_refused_by_key_and_imported_without_the_optimizer(tmp_path, capsys):
    _, tensors, arguments = llama()
    write(tmp_path / "m", tensors, arguments, Layout("buckets"))
    line = refused(tmp_path / "m", tmp_path / "out", capsys)
    assert "optimizer.distributed.dp_group_idx_0.gbuf_idx_0" in line
    assert "need a checkpoint of Megatron's --dist-ckpt-optim-fully-reshardable, or" in line
    assert run_import(tmp_path / "m", tmp_path / "out", "--weights-only") == 0
    assert open_checkpoint(tmp_path / "out" / "step-00000000").manifest.states == WEIGHTS


def test_norms_have_either_of_megatrons_names(tmp_path):
    _, tensors, arguments = llama(local_norms=True)
    write(tmp_path / "m", tensors, arguments, Layout())
    assert run_import(tmp_path / "m" / "iter_0000005", tmp_path / "out") == 0
    found = open_checkpoint(tmp_path / "out" / "step-00000000")
    norm = found.tensor("weight", "blocks.1.norm1.weight")
    assert torch.equal(norm, tensors["decoder.layers.1.input_layernorm.weight"])


REFUSED = {
    "multi_latent_attention": (True, "need False"),
    "position_embedding_type": ("mrope", "need 'learned_absolute' or 'rope'"),
    "normalization": ("LayerNorm2", "need 'LayerNorm' or 'RMSNorm'"),
    "rotary_interleaved": (True, "need False"),
    "moe_layer_freq": ([1, 0], "need dense blocks first"),
    "moe_shared_expert_intermediate_size": (24, "need a multiple of moe_ffn_hidden_size (16)"),
    "moe_router_num_groups": (2, "need null, moe_router_pre_softmax or"),
    "num_layers": (3, "need [3,"),
    "num_query_groups": (4, "need [2, 96, 32]"),
    "window_size": ((-1, 0), "need (tokens before, 0)"),
    "num_experts": ("four", "need a number"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_imported_is_refused_by_argument_or_tensor(key, tmp_path, capsys):
    value, fits = REFUSED[key]
    _, tensors, _ = qwen2_moe()
    arguments = EXPERTS | {"moe_router_pre_softmax": key != "moe_router_num_groups", key: value}
    arguments |= {"num_layers": 2}
    write(tmp_path / "m", tensors, arguments, Layout(more={}))
    if key == "num_layers":
        change_arguments(tmp_path / "m", num_layers=3)
    line = refused(tmp_path / "m", tmp_path / "out", capsys)
    assert fits in line
    assert key in line or key in ("num_layers", "num_query_groups")


def change_arguments(folder, **values):
    path = folder / "iter_0000005" / "common.pt"
    common = torch.load(path, weights_only=False)
    vars(common["args"]).update(values)
    torch.save(common, path)


def test_a_tensor_that_the_arguments_do_not_name_is_refused(tmp_path, capsys):
    _, tensors, arguments = llama()
    strange = {"decoder.layers.0.mlp.adapter.weight": torch.ones(2)}
    strange["decoder.layers.1.mlp.adapter.weight"] = torch.ones(2)
    write(tmp_path / "m", tensors | strange, arguments, Layout())
    line = refused(tmp_path / "m", tmp_path / "out", capsys)
    assert "decoder.layers.mlp.adapter.weight: not part of the model that args describe" in line


def test_a_missing_tokenizer_and_a_state_that_only_some_have_are_refused(tmp_path, capsys):
    assert main(["import", "--megatron", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "--tokenizer: missing, need PATH or none with --megatron" in capsys.readouterr().err
    assert main(["import", "--out", str(tmp_path / "o")]) == 2
    assert "model: missing, need a Hugging Face model or --megatron" in capsys.readouterr().err
    _, tensors, arguments = llama()
    lost = Layout("reshardable", without_states="final_layernorm.weight")
    write(tmp_path / "m", tensors, arguments, lost)
    line = refused(tmp_path / "m", tmp_path / "out", capsys)
    assert "optimizer.state.exp_avg.decoder.final_layernorm.weight: missing, need it of" in line


class Kind(enum.Enum):
    """As Megatron's own enums, of a module that is not installed."""

    FLASH = 1


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def test_classes_that_arguments_name_are_not_loaded(tmp_path, capsys):
    """Arguments have enums of Megatron's modules, and a folder need not be trusted."""
    _, tensors, arguments = llama()
    more = {"attention_backend": Kind.FLASH, "save": tmp_path}
    write(tmp_path / "m", tensors, arguments, Layout(more=more))
    assert run_import(tmp_path / "m", tmp_path / "out") == 0
    capsys.readouterr()
    change_arguments(tmp_path / "m", code=Code(tmp_path / "ran"))
    line = refused(tmp_path / "m", tmp_path / "other", capsys)
    assert "common.pt: content: UnpicklingError" in line
    assert not (tmp_path / "ran").exists()
