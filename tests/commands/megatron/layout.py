"""Writes models of transformers as Megatron core would: the format torch_dist, by its public
description. Two tensor ranks and two data ranks, on which tensors and optimizer are cut."""

import argparse
import io
import json
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

TENSOR_RANKS = 2
COLUMNS = ("linear_qkv.weight", "linear_qkv.bias", "embeddings.weight", "output_layer.weight")
ROWS = ("linear_proj.weight", "linear_fc2.weight")


def grouped(query, key, value, config):
    """Rows of queries, keys and values, one query group after the other."""
    groups = config.num_key_value_heads
    parts = [part.unflatten(0, (groups, -1)) for part in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def of_gpt2(model):
    """The parameters of GPT-2 by Megatron's names, those of blocks as `layers.N.NAME`."""
    held = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    found = {
        "embedding.word_embeddings.weight": held["wte.weight"],
        "embedding.position_embeddings.weight": held["wpe.weight"],
        "decoder.final_layernorm.weight": held["ln_f.weight"],
        "decoder.final_layernorm.bias": held["ln_f.bias"],
    }
    heads = argparse.Namespace(num_key_value_heads=model.config.n_head)
    names = {
        "attn.c_proj": "self_attention.linear_proj",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for i in range(model.config.n_layer):
        to = f"decoder.layers.{i}."
        for part in ("weight", "bias"):
            found[f"{to}self_attention.linear_qkv.layer_norm_{part}"] = held[f"h.{i}.ln_1.{part}"]
            found[f"{to}mlp.linear_fc1.layer_norm_{part}"] = held[f"h.{i}.ln_2.{part}"]
            packed = held[f"h.{i}.attn.c_attn.{part}"]
            packed = packed.t() if part == "weight" else packed
            found[f"{to}self_attention.linear_qkv.{part}"] = grouped(*packed.chunk(3), heads)
            for theirs, name in names.items():
                value = held[f"h.{i}.{theirs}.{part}"]
                found[f"{to}{name}.{part}"] = value.t() if part == "weight" else value
    return found


def of_llama(model, local_norms=False):
    """The same of Llama, Qwen2-MoE and GLM-4-MoE. `local_norms`: their names without TE."""
    held = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    found = {
        "embedding.word_embeddings.weight": held["embed_tokens.weight"],
        "decoder.final_layernorm.weight": held["norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        found["output_layer.weight"] = held["lm_head.weight"]
    for i in range(model.config.num_hidden_layers):
        of = {k.removeprefix(f"layers.{i}."): v for k, v in held.items() if f"layers.{i}." in k}
        to = f"decoder.layers.{i}."
        has_experts = "mlp.gate.weight" in of
        norm1 = "input_layernorm." if local_norms else "self_attention.linear_qkv.layer_norm_"
        norm2 = "pre_mlp_layernorm." if has_experts else "mlp.linear_fc1.layer_norm_"
        found[f"{to}{norm1}weight"] = of["input_layernorm.weight"]
        found[f"{to}{norm2}weight"] = of["post_attention_layernorm.weight"]
        for part in ("weight", "bias"):
            if f"self_attn.q_proj.{part}" in of:
                rows = [of[f"self_attn.{p}_proj.{part}"] for p in "qkv"]
                found[f"{to}self_attention.linear_qkv.{part}"] = grouped(*rows, model.config)
        found[f"{to}self_attention.linear_proj.weight"] = of["self_attn.o_proj.weight"]
        found |= dict(_mlp(of, to))
        for p in "qk":
            if f"self_attn.{p}_norm.weight" in of:
                norm = of[f"self_attn.{p}_norm.weight"]
                found[f"{to}self_attention.{p}_layernorm.weight"] = norm
    return found


def _mlp(of, to):
    shared = next((name for name in of if name.startswith("mlp.shared_expert")), "")
    shared = shared.rpartition(".")[0].rpartition(".")[0]
    for theirs, name in (("mlp", "mlp"), (shared, "mlp.shared_experts")):
        if f"{theirs}.gate_proj.weight" in of:
            pair = [of[f"{theirs}.{p}_proj.weight"] for p in ("gate", "up")]
            yield f"{to}{name}.linear_fc1.weight", torch.cat(pair)
            yield f"{to}{name}.linear_fc2.weight", of[f"{theirs}.down_proj.weight"]
    same = {
        "mlp.gate.weight": "router.weight",
        "mlp.gate.e_score_correction_bias": "router.expert_bias",
        "mlp.shared_expert_gate.weight": "shared_experts.gate_weight",
        "mlp.experts.gate_up_proj": "experts.experts.linear_fc1.weight",
        "mlp.experts.down_proj": "experts.experts.linear_fc2.weight",
    }
    for theirs, name in same.items():
        if theirs in of:
            yield f"{to}mlp.{name}", of[theirs]


@dataclass
class Layout:
    """How a checkpoint lies in its folder.

    optimizer: `reshardable` (one tensor for each parameter), `flattened` (the same, but each
    rank's part flattened and cut over data ranks), `buckets` (flat buffers), or none.
    """

    optimizer: str = ""
    is_stacked: bool = True
    is_gated: bool = True
    dtype: torch.dtype = torch.float32
    chain: str = ""
    master: str = "fp32_param"
    old: bool = True
    padding: int = 3
    without_states: str = "expert_bias"
    more: dict[str, object] = field(default_factory=dict)


def write(folder, tensors, arguments, layout, iteration=5):
    """Write tensors [natural names] as iteration 5, and return Adam's states by name."""
    root = folder / f"iter_{iteration:07d}"
    root.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    tensors = {name: padded(name, value, layout.padding) for name, value in tensors.items()}
    layers = arguments["num_layers"]
    items = [
        item
        for name, value in tensors.items()
        for item in pieces(name, value.to(layout.dtype), layout, layers)
    ]
    items += [("decoder.layers.self_attention.core_attention._extra_state/shard_0_1", None)]
    states = states_of(tensors)
    if layout.optimizer in ("reshardable", "flattened"):
        for state in ("exp_avg", "exp_avg_sq", layout.master):
            for name, value in states.get(state, tensors).items():
                prefix = f"{layout.chain}optimizer.state.{state}."
                if not name.endswith(("expert_bias", layout.without_states)):
                    items += pieces(name, value, layout, layers, prefix)
    if layout.optimizer == "buckets":
        key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
        items.append((key, (4,), (0,), torch.zeros(4)))
    args = argparse.Namespace(**arguments, **layout.more)
    group = {"params": [0], "step": 7, "lr": 0.1}
    common = {"args": args, "iteration": iteration, "checkpoint_version": 3.0}
    common["optimizer"] = {"optimizer": {"param_groups": [group]}}
    if layout.old:
        torch.save(common, root / "common.pt")
    else:
        items.append(("common_state/shard_0_1", [common]))
    save({}, storage_writer=FileSystemWriter(root), planner=_Planner(items), no_dist=True)
    return states


def states_of(tensors):
    """Adam's states of each tensor."""
    generator = torch.Generator().manual_seed(1)
    return {
        state: {n: torch.rand(t.shape, generator=generator) for n, t in tensors.items()}
        for state in ("exp_avg", "exp_avg_sq")
    }


def padded(name, value, rows):
    """The vocabulary's matrices with rows that no token has, which Megatron trains too."""
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return torch.cat([value, torch.full((rows, value.shape[1]), 9.0)])
    return value.clone()


def pieces(name, value, layout, layers, prefix=""):
    """(key, global shape, offset, values) of each rank's part of a tensor."""
    before, inner = [], name
    if ".layers." in name and layout.is_stacked:
        _, number, inner = name.removeprefix("decoder.").split(".", 2)
        before, name = [(int(number), layers)], f"decoder.layers.{inner}"
    is_experts = ".experts.experts." in name
    experts = list(value) if is_experts else [value]
    for e, part in enumerate(experts):
        lead = [*before, *([(e, len(experts))] if is_experts else [])]
        for cell, counts, local in _of_ranks(inner, part, layout.is_gated):
            grid = [*lead, *zip(cell, counts, strict=True)]
            is_flat = bool(prefix) and layout.optimizer == "flattened"
            yield from _stored(prefix + name, grid, local, is_flat, len(lead))


def _of_ranks(name, value, is_gated):
    """The part of each tensor rank: which of how many in each dimension. With a gate, each rank
    has rows of both halves, which are stored as two parts."""
    dims = value.dim()
    axis = 0 if name.endswith((*COLUMNS, "fc1.weight", "fc1.bias")) else None
    axis = 1 if name.endswith(ROWS) else axis
    count = 1 if axis is None else TENSOR_RANKS
    halves = 2 if is_gated and "linear_fc1" in name and axis == 0 else 1
    for rank in range(count):
        local = value if axis is None else torch.cat(
            [half.chunk(count, axis)[rank] for half in value.chunk(halves, axis)], axis
        )  # fmt: skip
        for half, part in enumerate(local.chunk(halves, axis or 0)):
            cell, counts = [0] * dims, [1] * dims
            if axis is not None:
                cell[axis], counts[axis] = half * count + rank, halves * count
            yield cell, counts, part


def _stored(key, grid, local, is_flat, leading):
    sizes = [1] * leading + list(local.shape)
    if not is_flat:
        shape = [count * size for (_, count), size in zip(grid, sizes, strict=True)]
        offset = [at * size for (at, _), size in zip(grid, sizes, strict=True)]
        yield key, shape, offset, local.reshape(sizes)
        return
    flat, cells = local.reshape(-1), [at for at, _ in grid]
    cut = len(flat) // 3
    for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
        shape = [*(count for _, count in grid), len(flat)]
        yield key, shape, [*cells, start], part.reshape([1] * len(grid) + [-1])


class _Planner(DefaultSavePlanner):
    """Gives DCP parts as they are, and objects."""

    def __init__(self, items):
        super().__init__(flatten_state_dict=False)
        self._items, self._values = items, {}

    def create_local_plan(self):
        written = []
        for key, *rest in self._items:
            if len(rest) == 1:
                index = MetadataIndex(key)
                written.append(WriteItem(index, WriteItemType.BYTE_IO))
                self._values[index] = rest[0]
                continue
            shape, offset, value = rest
            index = MetadataIndex(key, torch.Size(offset))
            chunk = ChunkStorageMetadata(torch.Size(offset), value.shape)
            data = TensorWriteData(chunk, TensorProperties(value.dtype), torch.Size(shape))
            written.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._values[index] = value.clone()
        self.plan = SavePlan(written)
        return self.plan

    def resolve_data(self, write_item):
        index = write_item.index
        if write_item.type != WriteItemType.BYTE_IO:
            return self._values[MetadataIndex(index.fqn, index.offset)]
        data = io.BytesIO()
        torch.save(self._values[MetadataIndex(index.fqn)], data)
        return data
