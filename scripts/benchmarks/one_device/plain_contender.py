"""transformers' Llama in a loop by hand, with fused AdamW and clipping: one_device's contender."""

from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megafrontier.families.llama import Llama
from scripts.benchmarks.one_device.setting import BETAS, CLIP, LR, WEIGHT_DECAY, Rows, Setting
from scripts.benchmarks.shared.child import Clock, device


def plain(setting: dict[str, Any], compiled: bool, masters: bool = True) -> dict[str, float]:
    """A loop by hand around transformers' Llama. bf16 by autocast, or without `masters` as weights
    in bf16, which AdamW updates as they are: less work and memory, and a coarser update."""
    chosen = Setting(**setting)
    clock = Clock(chosen.warm_up, chosen.steps)
    model = _llama(chosen).to(device())
    if not masters:
        model = model.bfloat16()
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    pinned = torch.cuda.is_available()
    loader = DataLoader(Rows(chosen), chosen.batch, drop_last=True, pin_memory=pinned)
    rows = chain.from_iterable(repeat(loader))
    while not clock.done:
        tokens = next(rows).to(device(), non_blocking=True)
        with torch.autocast(device().type, torch.bfloat16, enabled=chosen.mixed and masters):
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick()
    return clock.figures() | {"loss": loss.item()}


def _llama(setting: Setting) -> Any:
    torch.manual_seed(0)
    keys = Llama().write_config(setting.model)
    config = LlamaConfig(vocab_size=setting.model.vocab_size, use_cache=False, **keys)
    return LlamaForCausalLM(config)
