"""What every test stands on: one thread in the parent, so that it may fork ranks at any time."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import torch

torch.set_num_threads(1)
