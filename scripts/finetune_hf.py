"""Fine-tune a Hugging Face model, sharded, and write it in Hugging Face's format.

    torchrun --nproc-per-node=8 scripts/finetune_hf.py OUT --model NAME --machine nvlink8
    python scripts/finetune_hf.py OUT         # a tiny model of random weights, without a network
    python scripts/finetune_hf.py OUT --lora 16      # adapters of rank 16 (LoRA), with peft

The embedding is frozen; with --lora, all but the adapters is, and OUT gets the adapters. The text
is arithmetic: replace `batch` by your tokens.
"""

import argparse
import resource

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import megafrontier
from megafrontier.common.errors import UserError

STEPS, GLOBAL_BATCH, LENGTH = 30, 16, 12


def build(name: str | None) -> nn.Module:
    torch.manual_seed(0)  # the same first values on every rank
    if name is None:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model with trained low-rank matrices (LoRA, arXiv:2106.09685) beside its frozen ones."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UserError(f"--lora: {rank}, but peft is missing, need pip install peft") from error
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def peak_gib(device: torch.device) -> float:
    """The most memory so far: all tensors on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def batch(step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    first = torch.randint(64, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((first + 3 * torch.arange(LENGTH)) % 64).chunk(parts)[part]


def main(out: str, model: str | None, machine: str, lora: int = 0, steps: int = STEPS) -> None:
    mesh = megafrontier.init_mesh(machine, exit_on_error=True)
    net = with_adapters(build(model), lora) if lora else build(model)
    layers = "base_model.model.model.layers.*" if lora else "model.layers.*"
    net = megafrontier.shard(net, mesh, blocks=layers)
    optimizer = megafrontier.AdamW(net, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for step in range(steps):
        tokens = batch(step, mesh.data_rank, mesh.data_size).to(mesh.device)
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        megafrontier.clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = mesh.world.sum(loss.detach().double().view(1)).item() / mesh.world.size
        if mesh.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{steps}  loss {mean:.6f}", flush=True)
    print(f"rank {mesh.rank}: peak memory {peak_gib(mesh.device):.2f} GiB", flush=True)
    full = net.state_dict()  # on every rank, because units are gathered from all of them
    if mesh.rank == 0:
        net.save_pretrained(out, state_dict=full)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="folder of the trained model")
    parser.add_argument("--model", help="a Hugging Face name or folder")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: no adapters")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--machine", default="laptop", help="a machine's name or file")
    main(**vars(parser.parse_args()))
