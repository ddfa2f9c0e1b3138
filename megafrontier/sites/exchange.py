"""The exchange between sites, as a callback of training.

Every `sites.spacing` steps each site offers how one fragment of its weights has changed, and
`sites.delay` steps later all sites move the weights that they agree on by the mean of the changes.
All ranks of a site do the same in the same step.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafrontier.common.errors import RunFailed, UserError
from megafrontier.config import Config
from megafrontier.config.sites import SitesConfig
from megafrontier.partition.unit import Unit
from megafrontier.sites.directory import range_of
from megafrontier.sites.endpoint import Endpoint
from megafrontier.sites.fetch import Part
from megafrontier.sites.outer import Outer, common_rows, mean_change
from megafrontier.sites.rounds import Decision, Report, describe_absent
from megafrontier.sites.transport import Header
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import StepResult, StepStats
from megafrontier.training.trainer import Trainer

WAITS = "site_waits"
"""Metric: 1 if another site has waited for this one for long, else 0."""
PAUSE_SECONDS = 0.02


@dataclass
class Offer:
    """An exchange that has begun here."""

    event: int
    step: int
    """After this optimizer step."""
    tokens: float
    """That the change comes from; 0: this site sends nothing."""


@dataclass
class Progress:
    """Where a site is among the exchanges. A site that comes back takes it from another one."""

    next_event: int
    last_step: int
    """The step after which the newest exchange began."""
    versions: list[int]
    """Exchanges of each fragment that are over."""
    exchanged_at: list[int]
    """The step of the last one of each fragment, the same at all sites."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Progress":
        """From `asdict`, among other values."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class SiteExchange(Callback):
    """See the module. Made before the run resumes, because checkpoints keep its state."""

    priority = 10  # before checkpoints are saved

    def __init__(self, trainer: Trainer, config: SitesConfig) -> None:
        self._config, self._world = config, trainer.world
        self.outer = Outer(trainer.engine.trained_units, config)
        trainer.kept_states |= self.outer.states
        fragments = config.fragments
        self._progress = Progress(0, 0, [0] * fragments, [0] * fragments)
        self._offers: list[Offer] = []
        """Exchanges in progress, oldest first."""
        self._tokens = [0.0] * fragments
        """Tokens since the last exchange of each fragment."""
        self._fresh_tokens = torch.zeros((), dtype=torch.float64, device=trainer.world.device)
        """Tokens since `_tokens` was brought up to date."""
        self._has_begun = self._is_waited_for = False
        self._fingerprint = fingerprint(trainer.config, self.outer.units)

    def state_dict(self) -> dict[str, Any]:
        self._read_tokens()
        offers = [asdict(offer) for offer in self._offers]
        return {**asdict(self._progress), "offers": offers, "tokens": self._tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._has_begun = True
        self._offers = [Offer(**offer) for offer in state_dict["offers"]]
        self._tokens, self._progress = state_dict["tokens"], Progress.of(state_dict)

    # Start and end

    def at_start(self, trainer: Trainer) -> None:
        self._step = trainer.step
        if not self._has_begun:
            self.outer.begin()
        self._endpoint = Endpoint(
            self._config, self._world, trainer.engine.ledger, self.outer, self._place
        )
        self._want()
        for offer in self._offers:
            fragment = self.outer.fragment_of(offer.event)
            self._endpoint.publish(offer.event, self.outer.encode_again(fragment))
        source = int(self._world.broadcast_from_rank_0(self._meet))
        if source >= 0:
            self._adopt(trainer, source)
            trainer.engine.restore(has_published=False)

    def at_end(self, trainer: Trainer) -> None:
        if trainer.step >= trainer.config.train.steps:  # others may need the last messages
            self._world.run_on_all(self._wait_for_others)
        self._endpoint.close()

    def on_error(self, trainer: Trainer, error: Exception) -> None:
        if hasattr(self, "_endpoint"):
            self._endpoint.close()

    def _place(self) -> Header:
        """What this site trains, and where it is."""
        offers = [offer.step for offer in self._offers]
        own = {"fingerprint": self._fingerprint, "step": self._step, "offers": offers}
        return own | asdict(self._progress)

    def _meet(self) -> str:
        """Wait for the other sites to answer, at most until the deadline. Returns the one that has
        seen most exchanges, if those are more than here, else -1."""
        rounds, late = self._endpoint.rounds, time.monotonic() + self._config.deadline_seconds
        seen: dict[int, int] = {}
        while len(seen) < len(self._endpoint.others) and time.monotonic() < late:
            for site in self._endpoint.others:
                answer = rounds.ask(site, {"ask": "hello"})
                if answer and answer["fingerprint"] != self._fingerprint:
                    raise UserError(
                        f"sites: site {site} trains another model, or exchanges it in another way, "
                        "need the same model, parallel, optimizer, precision and sites everywhere"
                    )
                if answer:
                    seen[site] = sum(answer["versions"])
                    rounds.hear(site)
            time.sleep(PAUSE_SECONDS)
        newest = max(seen, key=lambda site: (seen[site], -site), default=-1)
        return str(newest if seen.get(newest, 0) > sum(self._progress.versions) else -1)

    def _wait_for_others(self) -> None:
        """Answer until every other site that answers is at the end too, or the deadline."""
        late = time.monotonic() + self._config.deadline_seconds
        waiting = set(self._endpoint.others) if self._world.rank == 0 else set()
        while waiting and time.monotonic() < late:
            for site in sorted(waiting):
                answer = self._endpoint.rounds.ask(site, {"ask": "hello"})
                if not answer or answer["versions"] >= self._progress.versions:
                    waiting.discard(site)
            time.sleep(PAUSE_SECONDS)

    # Steps

    def before_optimizer(self, trainer: Trainer, gradients: Sequence[Tensor]) -> None:
        late = self._config.deadline_seconds / 2
        waits = self._endpoint.fetcher.waiting_seconds(self._progress.next_event) > late
        trainer.metrics.record(WAITS, float(waits), "max")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_waited_for = result.metrics[WAITS] == 1

    def after_optimizer(self, trainer: Trainer, stats: StepStats) -> None:
        self._fresh_tokens += stats.results["tokens"]
        spacing, step = self._config.spacing, trainer.step + 1
        is_due = spacing > 0 and step // spacing > self._progress.last_step // spacing
        if is_due or (spacing > 0 and self._is_waited_for):
            self._offer(trainer, step)
        while self._offers and self._offers[0].step + self._config.delay <= trainer.step + 1:
            self._finish(trainer)
        if trainer.step + 1 >= trainer.config.train.steps:
            self._finish_all(trainer)
        self._step = trainer.step + 1

    def _finish_all(self, trainer: Trainer) -> None:
        """After the last step, exchange every fragment that changed since its last exchange."""
        while self._offers:
            self._finish(trainer)
        end = trainer.config.train.steps
        while self._progress.exchanged_at[self._next_fragment] < end:
            self._offer(trainer, end)
            self._finish(trainer)

    @property
    def _next_fragment(self) -> int:
        return self.outer.fragment_of(self._progress.next_event)

    def _read_tokens(self) -> None:
        fresh = float(self._fresh_tokens.item())
        self._fresh_tokens.zero_()
        self._tokens = [count + fresh for count in self._tokens]

    def _offer(self, trainer: Trainer, step: int) -> None:
        """Begin the next exchange. A fragment is in one exchange at a time."""
        fragment_of = self.outer.fragment_of
        while any(fragment_of(offer.event) == self._next_fragment for offer in self._offers):
            self._finish(trainer)  # which may replace the progress by another site's
        progress, fragment = self._progress, self._next_fragment
        self._read_tokens()
        offer = Offer(progress.next_event, step, self._tokens[fragment])
        self._tokens[fragment], self._is_waited_for = 0.0, False
        progress.next_event, progress.last_step = offer.event + 1, step
        self._offers.append(offer)
        self._endpoint.publish(offer.event, self.outer.encode(fragment))
        self._want()

    def _want(self) -> None:
        """Fetch what is needed now, and the next messages, which say whether others wait."""
        events = {offer.event for offer in self._offers}
        self._endpoint.fetcher.want(events | {self._progress.next_event})

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the decision about the oldest exchange, and follow it."""
        offer, own = self._offers[0], self._config.number
        fragment = self.outer.fragment_of(offer.event)
        checksum = int(self._world.total(self.outer.checksum(fragment)).item())
        with trainer.engine.ledger.waiting("sites"):
            decision = self._decide(offer, checksum)
        if absent := describe_absent(decision, len(self._config.addresses)):
            trainer.run_logger.info(f"sites: step {offer.step}: {absent}")
        others = set(decision.tokens) - {own}
        is_behind = decision.checksum != checksum or not others <= self._held(offer.event)
        if is_behind and others:
            self._adopt(trainer, min(others))
            return
        with self._endpoint.lock:
            if decision.tokens:
                self._apply(offer, decision)
            self._progress.versions[fragment] += 1
            self._progress.exchanged_at[fragment] = max(decision.step, offer.step)
            self._offers.pop(0)
        self._want()
        # A slow site took fewer steps, and goes on at the step of the others.
        ahead = max(0, decision.step - offer.step)
        trainer.step = min(trainer.step + ahead, trainer.last_step - 1)

    def _decide(self, offer: Offer, checksum: int) -> Decision:
        """The decision about an exchange, the same on all ranks."""
        own = self._config.number
        while True:
            holds = tuple(sorted(self._held(offer.event) | {own}))
            report = Report(offer.event, own, offer.step, offer.tokens, checksum, holds)
            text = self._world.broadcast_from_rank_0(partial(self._resolve, report))
            if text:
                return Decision.from_json(json.loads(text))
            time.sleep(PAUSE_SECONDS)

    def _resolve(self, report: Report) -> str:
        decision = self._endpoint.rounds.resolve(report)
        return "" if decision is None else json.dumps(asdict(decision))

    def _held(self, event: int) -> set[int]:
        """The other sites whose messages all ranks hold."""
        here, others = set(self._endpoint.fetcher.held(event)), self._endpoint.others
        missing = torch.tensor([float(n not in here) for n in others], dtype=torch.float64)
        found = self._world.maximum(missing.to(self._world.device)).tolist()
        return {n for n, is_missing in zip(others, found, strict=True) if not is_missing}

    def _apply(self, offer: Offer, decision: Decision) -> None:
        """Move the weights by the mean of the changes."""
        fetcher, own = self._endpoint.fetcher, self._config.number
        parts = {n: fetcher.parts(offer.event, n) for n in decision.tokens if n != own}
        for place, index in enumerate(self.outer.fragments[self.outer.fragment_of(offer.event)]):
            unit = self.outer.units[index]
            changes = {n: self._assemble(index, place, found) for n, found in parts.items()}
            if own in decision.tokens:
                changes[own] = self.outer.sent[index]
            mean = mean_change(changes, decision.tokens)
            unit.hierarchy.broadcast_to_replicas([mean], unit.placement.optimizer)
            self.outer.update(index, mean)

    def _assemble(self, index: int, place: int, parts: Sequence[Part]) -> Tensor:
        """Another site's change of this rank's shard of a unit, the `place`th of its fragment."""
        unit = self.outer.units[index]
        found = torch.zeros_like(self.outer.weights[index])
        for part, theirs in self._covering(unit, index, parts):
            start, stop = common_rows(theirs, unit.range)
            if start < stop:
                change = self.outer.decode(part.messages[place], stop - start)
                copy_overlap(found, unit.range[0], change, start)
        return found

    def _covering(
        self, unit: Unit, index: int, parts: Sequence[Part]
    ) -> list[tuple[Part, tuple[int, int]]]:
        """The parts that are about a unit, and the range of each."""
        key = self._endpoint.keys[index]
        return [(p, range_of(unit, h)) for p in parts for h in p.holdings if h.key == key]

    # Coming back

    def _adopt(self, trainer: Trainer, source: int) -> None:
        """Go on with the weights of another site, at its place in the run. What this site has not
        sent is lost. Raises RunFailed."""
        trainer.run_logger.info(f"sites: going on with the weights of site {source}")
        late = time.monotonic() + self._config.deadline_seconds
        while True:
            versions = self._copy_state(source)
            text = self._world.broadcast_from_rank_0(lambda: self._ask_place(source))
            place = json.loads(text) if text else {}
            if versions is not None and place.get("versions") == versions:
                break
            if not self._world.all_true(time.monotonic() < late):
                raise RunFailed(f"sites: site {source} does not send its weights")
            time.sleep(PAUSE_SECONDS)
        self._progress = Progress.of(place)
        first = self._progress.next_event - len(place["offers"])
        self._offers = [Offer(first + i, step, 0.0) for i, step in enumerate(place["offers"])]
        self._tokens = [0.0] * self._config.fragments
        self._fresh_tokens.zero_()
        trainer.step = min(max(trainer.step, place["step"]), trainer.last_step - 1)
        self._want()

    def _ask_place(self, source: int) -> str:
        answer = self._endpoint.rounds.ask(source, {"ask": "hello"})
        return json.dumps(answer) if answer else ""

    def _copy_state(self, source: int) -> list[int] | None:
        """Copy the state of another site. Returns the versions of its fragments, or None if it does
        not answer, or went on in between."""
        found = []
        for fragment, members in enumerate(self.outer.fragments):
            parts = self._endpoint.fetch_state(source, fragment)
            versions = [part.version for part in parts or ()]
            bounds = [max(versions, default=-1), -min(versions, default=2**31)]
            own = torch.tensor([*bounds, float(parts is None)], dtype=torch.float64)
            newest, oldest, fails = self._world.maximum(own.to(self._world.device)).tolist()
            if fails or newest != -oldest:
                return None
            found.append(int(newest))
            for place, index in enumerate(members):
                self._copy_unit(index, place, parts or [])
        return found

    def _copy_unit(self, index: int, place: int, parts: Sequence[Part]) -> None:
        unit, weights = self.outer.units[index], self.outer.weights[index]
        state = torch.zeros(2, len(weights), device=weights.device)
        for part, (start, _) in self._covering(unit, index, parts):
            values = part.messages[place].view(torch.float32).view(2, -1).to(weights.device)
            copy_overlap(state, unit.range[0], values, start)
        unit.hierarchy.broadcast_to_replicas([state], unit.placement.optimizer)
        self.outer.adopt(index, *state)


def copy_overlap(target: Tensor, target_start: int, source: Tensor, source_start: int) -> None:
    """Copy what two ranges of one buffer have in common. Both tensors are [..., n], from their
    starts on."""
    start = max(target_start, source_start)
    stop = min(target_start + target.shape[-1], source_start + source.shape[-1])
    if start < stop:
        into = slice(start - target_start, stop - target_start)
        target[..., into] = source[..., start - source_start : stop - source_start]


def fingerprint(config: Config, units: Sequence[Unit]) -> str:
    """The same for sites that can train together."""
    assert config.sites is not None
    shared = asdict(config.sites)
    for own in ("number", "secret", "deadline_seconds", "global_batches"):
        del shared[own]
    splits = asdict(config.parallel)
    layouts = [(unit.name, unit.layout.entries) for unit in units]
    text = repr((asdict(config.model), splits, shared, layouts, config.train.steps))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
