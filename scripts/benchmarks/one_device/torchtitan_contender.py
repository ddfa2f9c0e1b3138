"""torchtitan: a contender of one_device that must be installed and needs a GPU.

Its own Trainer on one GPU: blocks compiled one by one, chunked loss, FlexAttention (it has no plain
causal attention for language models), autocast or its mixed precision, no checkpointing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scripts.benchmarks.one_device.setting import CLIP, LR, Feed, Setting
from scripts.benchmarks.shared.child import Clock, Finished, Unable

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def torchtitan(setting: dict[str, Any]) -> dict[str, float]:
    """The figures of torchtitan's training loop."""
    from torchtitan.trainer import Trainer

    chosen = Setting(**setting)
    clock = Clock(chosen.warm_up, chosen.steps)
    config = trainer_config(chosen, clock)
    if not torch.cuda.is_available():
        raise Unable("needs a GPU")
    os.environ.update(ALONE)
    os.environ.setdefault("MASTER_PORT", "29541")
    try:
        Trainer(config).train()
    except Finished:
        return clock.figures()
    raise RuntimeError("torchtitan ended by itself")


def trainer_config(setting: Setting, clock: Clock) -> Any:
    """torchtitan's configuration of the setting, with our tokens as its data."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    spec = model_registry("debugmodel")
    spec.flavor, spec.model = setting.preset, _model(setting)
    dtype = "bfloat16" if setting.mixed else "float32"
    tokenizer, data = _stand_ins(setting, clock)
    cross_entropy = CrossEntropyLoss.Config(global_vocab_size=setting.model.vocab_size)
    return Trainer.Config(
        model_spec=spec,
        tokenizer=tokenizer,
        dataloader=data,
        loss=ChunkedLossWrapper.Config(loss_fn=cross_entropy),
        optimizer=default_adamw(lr=LR),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=setting.batch,
            seq_len=setting.sequence_length,
            steps=10_000,
            max_norm=CLIP,
            mixed_precision_param=dtype,
        ),
        metrics=MetricsProcessor.Config(log_freq=10_000),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True),
        validator=Validator.Config(enable=False),
    )


def _model(setting: Setting) -> Any:
    """Llama 3's parts at our sizes, the way torchtitan's own sizes are written down."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    model = setting.model
    vocab_size, hidden = model.vocab_size, model.hidden
    head_size = hidden // model.heads
    rope = ComplexRoPE.Config(
        dim=head_size, max_seq_len=setting.sequence_length, theta=model.rotary_base
    )
    return llama3.Llama3Model.Config(
        dim=hidden,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=hidden,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=hidden, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=hidden,
            out_features=vocab_size,
            param_init=llama3._output_linear_init(hidden),
        ),
        layers=llama3._build_llama3_layers(
            n_layers=model.layers,
            dim=hidden,
            n_heads=model.heads,
            hidden_dim=model.mlp_hidden,
            rope=rope,
            attn_backend="flex",
        ),
    )


def _stand_ins(setting: Setting, clock: Clock) -> tuple[Any, Any]:
    """Configurations of a tokenizer that is never asked, and of our batches as its data."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: object) -> None:
            self.eos_id = None

        def encode(self, *_: object, **__: object) -> Any:
            raise AssertionError("the corpus holds ids already")

        decode = encode

        def get_vocab_size(self) -> int:
            return setting.model.vocab_size

    class Data(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **_: object) -> None:
            self._feed = Feed(setting, clock)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for rows in self._feed:
                # Causal from 0 to the row's end: one document a row.
                positions = torch.arange(setting.sequence_length).expand(len(rows), -1)
                inputs = {"input": rows[:, :-1].contiguous(), "positions": positions.contiguous()}
                yield inputs, rows[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return NoTokenizer.Config(), Data.Config()
