"""transformers' Llama, in a loop by hand and in its Trainer: contenders of one_device.

All train the same model on the same corpus, with fused AdamW, clipping at 1, and fp32 masters
where they compute in bf16, unless they say otherwise. Each is set up as its users would.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

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
    optimizer = _adamw(model)
    rows = _batches(chosen)
    while not clock.done:
        tokens = next(rows).to(device(), non_blocking=True)
        with _autocast(chosen.mixed and masters):
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick()
    return clock.figures() | {"loss": loss.item()}


def _autocast(enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device().type, torch.bfloat16, enabled=enabled)


def _llama(setting: Setting) -> Any:
    torch.manual_seed(0)
    keys = Llama().write_config(setting.model)
    config = LlamaConfig(vocab_size=setting.model.vocab_size, use_cache=False, **keys)
    return LlamaForCausalLM(config)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def _loader(setting: Setting, ahead: int = 0) -> torch.utils.data.DataLoader:
    rows = Rows(setting, ahead)
    pinned = torch.cuda.is_available()
    return torch.utils.data.DataLoader(rows, setting.batch, drop_last=True, pin_memory=pinned)


def _batches(setting: Setting) -> Iterator[torch.Tensor]:
    while True:
        yield from _loader(setting)


def hugging_face(setting: dict[str, Any], compiled: bool) -> dict[str, float]:
    """transformers' Trainer."""
    chosen = Setting(**setting)
    clock = Clock(chosen.warm_up, chosen.steps)

    class Tick(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.tick()

    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=chosen.warm_up + chosen.steps,
        per_device_train_batch_size=chosen.batch,
        bf16=chosen.mixed,
        use_cpu=device().type == "cpu",
        torch_compile=compiled,
        optim="adamw_torch_fused",
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = LastLoss(
        _llama(chosen),
        arguments,
        data_collator=_collate,
        train_dataset=Rows(chosen),
        callbacks=[Tick()],
    )
    trainer.train()
    return clock.figures() | {"loss": trainer.loss.item()}


class LastLoss(Trainer):
    """Keeps the loss of the last step, which the others tell: its own is the mean of all."""

    loss: torch.Tensor

    def training_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
        self.loss = super().training_step(*inputs, **options)
        return self.loss


def _collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}
