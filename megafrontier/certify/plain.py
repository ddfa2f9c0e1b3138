"""The same training without this library's engine, loss, optimizer and windows: plain PyTorch."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megafrontier.certify.compare import NONE, Gap, assembled, gap_of_tensors, largest
from megafrontier.certify.miniature import STEPS
from megafrontier.certify.runs import Tensors, TrainedRun, random_corpus, whole_states
from megafrontier.checkpoint.format import BUFFER
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.commands.checkpoints import saved_config
from megafrontier.config import Config, ExpertGroupsConfig, ModelConfig
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.data.sampling.loader import PARTS, CorpusPart, open_loader
from megafrontier.data.sampling.samples import Batch, open_samples
from megafrontier.model.flops import parameter_specs
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.loss import IGNORE_INDEX
from megafrontier.model.mlp import activate
from megafrontier.model.moe.experts import Experts
from megafrontier.model.moe.layer import MoE
from megafrontier.model.moe.router import Router
from megafrontier.training.qk_clip import scaled_parameters

SLOPE_DISTANCE = 0.03
"""How far the weights of a parameter move: far enough for the rounding of the loss."""
ReadTokens = NDArray[np.int64]
"""[n, 3]: a token, its target or IGNORE_INDEX, and whether attention begins anew with it."""


def why_no_plain_gradient(config: Config) -> str | None:
    """Why plain PyTorch cannot compute the losses of a model; None if it can."""
    return None if config.model.prediction is None else "the loss of model.prediction"


def why_no_plain_update(config: Config) -> str | None:
    """Why there is no plain formula of a model's updates; None if there is."""
    if config.model.scaling is not None:
        return "model.scaling"
    names = {config.optimizer.name, *(group.name for group in config.optimizer.groups)}
    return "optimizer.name: lsp" if "lsp" in names else None


def initial_weights(config: Config) -> Tensors:
    """The weights of a run of one process before its first step, flat."""
    named = _initial_model(config.model, config.run.seed).named_parameters()
    return {name: parameter.detach().flatten() for name, parameter in named}


def initial_zeros(config: Config) -> list[str]:
    """The matrices whose weights are all 0 before the first step."""
    named = _initial_model(config.model, config.run.seed).named_parameters()
    return [name for name, parameter in named if parameter.dim() > 1 and not parameter.any()]


def _initial_model(config: ModelConfig, seed: int) -> GPT:
    model = GPT(config)
    initialise(model, seed)
    return model


def _first_batches(config: Config) -> list[Batch]:
    """The micro-batches of the first step."""
    loader = open_loader(config, "train", 0, 1)
    assert loader is not None
    batches = loader.step(0)
    loader.close()
    return batches


def plain_gradients(config: Config) -> tuple[float, Tensors]:
    """The first step's mean loss, and its gradients with the z-loss and those of routers, by
    autograd, flat."""
    model = _initial_model(config.model, config.run.seed)
    routers = _PlainRouters(model)
    total, square, tokens, counted_tokens = torch.zeros(()), torch.zeros(()), 0, 0
    for batch in _first_batches(config):
        padding = torch.zeros_like(batch.tokens, dtype=torch.bool)
        routers.counted = ~(padding if batch.padding is None else batch.padding).flatten()
        logits = model(batch.tokens, None, batch.documents).flatten(0, 1)
        targets = batch.targets.flatten()
        counted = targets != IGNORE_INDEX
        total += F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        square += torch.logsumexp(logits, 1)[counted].square().sum()
        tokens += int(counted.sum())
        counted_tokens += int(routers.counted.sum())
    mean = (total + config.train.z_loss * square) / tokens + routers.loss / counted_tokens
    mean.backward()
    named = model.named_parameters()
    gradients = {name: p.grad.flatten() for name, p in named if p.grad is not None}
    return total.item() / tokens, gradients


class _PlainRouters:
    """Mixtures of experts by autograd, expert by expert, and the losses of their routers.

    loss: the sum over tokens. counted: bool [n], the tokens of the next forward that count.
    """

    def __init__(self, model: GPT) -> None:
        self.loss, self.counted = torch.zeros(()), torch.ones(0, dtype=torch.bool)
        model.eval()  # without the routers' own losses
        for module in model.modules():
            if isinstance(module, MoE):
                module.dispatch = plain_dispatch
                module.router.register_forward_hook(self._add)

    def _add(self, router: Router, given: tuple[torch.Tensor, ...], _results: object) -> None:
        moe, logits = router.moe, given[0] @ router.weight.t()
        if router.logit_bias is not None:
            logits = logits + router.logit_bias
        self.loss = self.loss + moe.z_loss * logits.logsumexp(1)[self.counted].square().sum()
        if moe.balance == "loss":
            is_softmax = moe.router == "softmax"
            scores = logits.softmax(1) if is_softmax else F.normalize(logits.sigmoid(), 1, 1)
            # The load is 1 / experts in the first step.
            self.loss = self.loss + moe.loss_coefficient * scores[self.counted].sum()


def plain_dispatch(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts
) -> Callable[[], torch.Tensor]:
    """`Dispatch` in which each expert processes all tokens."""
    total = torch.zeros_like(hidden)
    for expert in range(experts.count):
        up, down = (_bias(biases, expert) for biases in (experts.up_bias, experts.down_bias))
        raised = activate(hidden @ experts.up[expert].t() + up, experts.activation)
        share = (weights * (chosen == expert)).sum(1, keepdim=True)
        total = total + share * (raised @ experts.down[expert].t() + down)
    return lambda: total


def _bias(biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    return torch.zeros(()) if biases is None else biases[expert]


def gap_of_slopes(config: Config) -> Gap:
    """How far each parameter's gradient is from the slope of the loss along a random direction, in
    the gradient's root mean square. In a mixture all experts are active: which are the best changes
    in jumps."""
    model = _initial_model(_without_choice(config.model), config.run.seed)
    generator, batch = torch.Generator().manual_seed(0), _first_batches(config)[0]

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(batch.tokens, batch.targets, batch.documents)
        return found

    def value() -> float:
        """With the loss of `prediction`, which is in the gradient alone."""
        found, predicted = loss().item(), model.head.prediction
        if predicted is not None:
            found += predicted.coefficient * predicted.take(batch.tokens.device)[0].item()
        return found

    loss().backward()
    value()  # takes what the call for the gradient has left
    gaps = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        direction = torch.randn(parameter.shape, generator=generator)
        direction *= SLOPE_DISTANCE / direction.norm()
        kept, losses = parameter.detach().clone(), []
        for sign in (1, -1):
            parameter.data.copy_(kept + sign * direction)
            losses.append(value())
        parameter.data.copy_(kept)
        expected = 2 * (gradient * direction).sum().item()
        scale = 2 * SLOPE_DISTANCE * gradient.norm().item() / parameter.numel() ** 0.5
        difference = losses[0] - losses[1] - expected
        gaps.append(Gap(abs(difference) / max(abs(expected), scale, 1e-9), name))
    return largest(gaps)


def _without_choice(model: ModelConfig) -> ModelConfig:
    model = deepcopy(model)
    if model.moe is not None:
        model.moe.active, model.moe.groups = model.moe.experts, ExpertGroupsConfig()
        model.moe.balance, model.moe.z_loss = "none", 0.0  # which are in the gradient alone
    return model


def gap_of_updates(run: TrainedRun, config: Config) -> Gap:
    """How far a run of one process is from torch's optimizers, step by step from its own weights
    and gradients. Parameters that QK-clip scales are left out."""
    like = initial_weights(config)
    scaled = scaled_parameters(config.model) if config.optimizer.qk_clip else {}
    before, found = like, [NONE]
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in like.items()}
    optimizers = _plain_optimizers(config, parameters)
    for step in range(1, STEPS + 1):
        after, _ = assembled(run.parts(step, "weights"), like)
        gradients, _ = assembled(run.parts(step, "gradients"), like)
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])
            parameter.grad = gradients[name].clone()
        if config.train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config.train.clip_grad_norm)
        for optimizer in optimizers if not run.steps[step].get("skipped") else ():
            for group in optimizer.param_groups:
                group["lr"] = run.steps[step]["lr"] * group["lr_scale"]
                group["weight_decay"] = _decay_factor(config, step - 1) * group["full_decay"]
            optimizer.step()
        kept = {n: p.data for n, p in parameters.items() if n not in scaled}
        found.append(gap_of_tensors(kept, {name: after[name] for name in kept}))
        before = after
    return largest(found)


def _decay_factor(config: Config, step: int) -> float:
    """What weight decay is multiplied by in a step, counted from 0."""
    decay, share = config.schedule.weight_decay, step / config.train.steps
    if config.schedule.by == "tokens":
        sizes = BatchSizes.of(config.train)
        share = sizes.before(step) / sizes.before(config.train.steps)
    if decay.name == "cosine":
        share = 0.5 - 0.5 * cos(pi * share)
    return (1 - share) * decay.start + share * decay.end


def _plain_optimizers(
    config: Config, parameters: Mapping[str, torch.nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """The optimizers of flat parameters: each has a param group of its own."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for name, parameter in parameters.items():
        spec = parameter_specs(config.model)[name]
        has_group = [g for g in config.optimizer.groups if _is_member(name, spec.kind, g.match)]
        given = asdict(has_group[0]) if has_group else {}
        own = {key: value for key, value in given.items() if value is not None}
        values = asdict(config.optimizer) | own
        decay = 0.0 if spec.kind in config.optimizer.no_decay else config.optimizer.weight_decay
        group = {key: values[key] for key in _OPTIONS[values["name"]]}
        group |= {"params": [parameter], "weight_decay": own.get("weight_decay", decay)}
        group |= {"lr_scale": values["lr"] / config.optimizer.lr}
        group["full_decay"] = group["weight_decay"]
        if values["name"] == "muon":
            rows = spec.head_rows if values["split_heads"] else 0
            group["matrix"] = rows or spec.shape[-2], spec.shape[-1]
        by_name.setdefault(values["name"], []).append(group)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": _PlainMuon}
    return [kinds[name](groups, lr=config.optimizer.lr) for name, groups in by_name.items()]


_OPTIONS = {"adamw": ("betas", "eps"), "sgd": ("momentum",), "muon": ("momentum",)}


def _is_member(name: str, kind: str, match: str) -> bool:
    """Whether a parameter belongs to `optimizer.groups[N].match`."""
    wanted, _, pattern = match.rpartition(":")
    return kind == match or (wanted in ("", kind) and fnmatchcase(name, pattern))


class _PlainMuon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) of flat parameters that are matrices of the shape `matrix`."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (parameter,), (rows, columns), rate = group["params"], group["matrix"], group["lr"]
            state, momentum = self.state[parameter], group["momentum"]
            old = state.get("momentum", torch.zeros_like(parameter))
            new = momentum * old + (1 - momentum) * parameter.grad
            state["momentum"] = new
            update = momentum * new + (1 - momentum) * parameter.grad
            parts = [_orthogonal(part) for part in update.view(-1, rows, columns)]
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.sub_(rate * max(1, rows / columns) ** 0.5 * torch.stack(parts).flatten())


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations of the fifth degree."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def losses_of_export(folder: Path, checkpoint: Path) -> tuple[float, float]:
    """The loss of random tokens by transformers' model of an export, and by ours."""
    from transformers import AutoModelForCausalLM  # takes seconds

    opened = open_checkpoint(checkpoint)
    config = saved_config(checkpoint)
    ours = GPT(config.model)
    states = whole_states(opened)
    missing, _ = ours.load_state_dict({**states["weight"], **states.get(BUFFER, {})}, strict=False)
    assert not missing, missing
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    shape = (2, config.model.sequence_length)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    found = []
    for model in (theirs, ours):
        model.eval()
        with torch.no_grad():
            logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        found.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item())
    return found[0], found[1]


def gap_of_samples(config: Config) -> Gap:
    """The share of an epoch's tokens that are missing, read twice, or have another target or
    document than in the documents of `write_corpora`, for the part of each corpus that has most."""
    data, found = config.data, [NONE]
    given = [*data.train, *data.valid]
    for number, corpus in enumerate(given):
        is_train = number < len(data.train)
        for part in PARTS if not data.valid else PARTS[:1] if is_train else PARTS[1:]:
            name = f"{part} part of {corpus.path.rpartition('/')[2]}"
            only = replace(corpus, weight=1.0)
            one = replace(data, train=[only], valid=[only] if data.valid else [])
            read = _read_epoch(replace(config, data=one), part)
            expected = _expected_epoch(config, number, part)
            found.append(Gap(_differing(read, expected), name))
    return largest(found)


def _read_epoch(config: Config, part: CorpusPart) -> ReadTokens:
    """The tokens of an epoch, without padding."""
    model = config.model
    length, before = model.sequence_length, BatchSizes.of(config.train).before
    samples = open_samples(config.data, length, config.run.seed, model.vocab_size, part, before)
    assert samples is not None
    rows = []
    for number in range(sum(samples.windows)):
        batch = samples.batch(number, 1)
        starts = np.zeros(length, np.int64)
        starts[[0] if batch.documents is None else batch.documents[:-1].numpy()] = 1
        row = np.stack([batch.tokens[0].numpy(), batch.targets[0].numpy(), starts], 1)
        rows.append(row if batch.padding is None else row[~batch.padding[0].numpy()])
    return np.concatenate(rows)


def _expected_epoch(config: Config, number: int, part: CorpusPart) -> ReadTokens:
    """The same of the `number`-th corpus that `write_corpora` writes."""
    written, sizes, mask = random_corpus(config, number)
    tokens = written.astype(np.int64)
    data, length = config.data, config.model.sequence_length
    share = 1.0 if data.valid else data.split[0] / sum(data.split)
    firsts = np.cumsum(sizes) - sizes
    at = np.arange(len(tokens) - 1)
    document = np.searchsorted(firsts, at, "right") - 1
    is_inside = at + 1 < (firsts + sizes)[document]
    offsets = at - firsts[document]
    if data.packing == "none":
        windows = (len(tokens) - 1) // length
        cut = int(windows * share) * length
        is_read = at < windows * length
        starts = (at % length == 0) | (data.document_mask & (offsets == 0))
        is_target = is_inside | (not data.document_mask)
    else:
        cut = firsts[int(np.sum(firsts < int(len(tokens) * share)))] if share < 1 else len(tokens)
        is_read = is_target = is_inside
        starts = offsets % length == 0
    is_read = is_read & ((at < cut) if part == "train" or data.valid else (at >= cut))
    targets = np.where(is_target & (mask[1:] == 1), tokens[1:], IGNORE_INDEX)
    return np.stack([tokens[:-1], targets, starts], 1)[is_read]


def _differing(found: ReadTokens, expected: ReadTokens) -> float:
    """The share of rows that only one of both has, in any order."""
    _, index = np.unique(np.concatenate([found, expected]), axis=0, return_inverse=True)
    signs = np.r_[np.ones(len(found)), -np.ones(len(expected))]
    differing = np.abs(np.bincount(index.ravel(), signs)).sum()
    return float(differing / max(1, len(expected)))
