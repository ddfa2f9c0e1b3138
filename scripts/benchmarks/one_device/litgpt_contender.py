"""litgpt: a contender of one_device that must be installed, see there.

Its own pretraining loop, fed with our tokens; the feed sees where a step ends.
"""

from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.one_device.setting import BETAS, CLIP, LR, WEIGHT_DECAY, Feed, Rows, Setting
from scripts.benchmarks.shared.child import Clock, Finished


def litgpt(setting: dict[str, Any]) -> dict[str, float]:
    """litgpt's `pretrain`, which always compiles; its AdamW is fused on a GPU only."""
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule

    chosen = Setting(**setting)
    clock = Clock(chosen.warm_up, chosen.steps)

    class Data(DataModule):
        """Hands the loop our batches as they are, and its sanity check two of them."""

        def connect(self, *_: object, **__: object) -> None:
            pass

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Feed(chosen, clock), batch_size=None)

        def val_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Rows(chosen, 1), chosen.batch)

    try:
        litgpt.pretrain.setup(
            model_name="megafrontier",
            model_config=_litgpt_model(chosen),
            out_dir=Path("litgpt"),
            precision="bf16-mixed" if chosen.mixed else "32-true",
            data=Data(),
            train=TrainArgs(
                save_interval=None,
                log_interval=10_000,
                global_batch_size=chosen.batch,
                micro_batch_size=chosen.batch,
                max_tokens=1 << 40,
                max_seq_length=chosen.sequence_length,
                max_norm=CLIP,
                lr_warmup_steps=0,
            ),
            eval=EvalArgs(interval=1 << 40, max_iters=1),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
            },
            devices=1,
            logger_name="csv",
        )
    except Finished:
        return clock.figures()
    raise RuntimeError("litgpt ended by itself")


def _litgpt_model(setting: Setting) -> Any:
    from litgpt import Config

    model = setting.model
    return Config(
        name="megafrontier",
        block_size=setting.sequence_length,
        n_layer=model.layers,
        n_embd=model.hidden,
        n_head=model.heads,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        intermediate_size=model.mlp_hidden,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.norm_eps,
        mlp_class_name="LLaMAMLP",
    )
