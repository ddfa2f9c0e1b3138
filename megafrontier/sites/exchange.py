"""The exchange between sites, as a callback of training.

Every `sites.spacing` steps each site offers how one fragment of its weights has changed, and
`sites.delay` steps later all sites move the weights that they agree on by the mean of the changes.
All ranks of a site do the same in the same step.
"""

import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafrontier.common.errors import PeersLost, RunFailed, need
from megafrontier.config.sites import SitesConfig
from megafrontier.sites.copying import SiteCopy
from megafrontier.sites.endpoint import Endpoint
from megafrontier.sites.meeting import PAUSE_SECONDS, meet, wait_for_others
from megafrontier.sites.outer import Outer, mean_change
from megafrontier.sites.progress import Offer, SiteProgress, fingerprint
from megafrontier.sites.rounds import Decision, Report, common_checksum, describe
from megafrontier.sites.transport import Header
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import StepResult, StepStats
from megafrontier.training.trainer import Trainer

QUIET_SECONDS = 5.0
"""How long a site waits for others without a line in the log."""
STOP_SECONDS = 5.0
"""How long a site that is asked to stop waits for the others at most."""
DIFFERS = "the common weights differ"
WAITS = "site_waits"
"""Metric: 1 if another site has waited for this one for long, else 0."""


class SiteExchange(Callback):
    """See the module. Made before the run resumes, because checkpoints keep its state."""

    priority = 10  # before checkpoints are saved

    def __init__(self, trainer: Trainer, config: SitesConfig) -> None:
        self._config, self._world, self._info = config, trainer.world, trainer.run_logger.info
        self.outer = Outer(trainer.engine.trained_units, config)
        trainer.kept_states |= self.outer.states
        fragments = config.fragments
        self._progress = SiteProgress(0, 0, [0] * fragments, [0] * fragments)
        self._offers: list[Offer] = []
        """Exchanges in progress, oldest first."""
        self._tokens = [0.0] * fragments
        """Tokens since the last exchange of each fragment."""
        self._fresh_tokens = torch.zeros((), dtype=torch.float64, device=trainer.world.device)
        """Tokens since `_tokens` was brought up to date."""
        self._nonfinite = [0] * fragments
        """How many of the newest exchanges of each fragment in a row had a non-finite change."""
        self._has_begun = self._is_waited_for = False
        self._present: set[int] = set()
        """Sites that took part in the last exchange."""
        self._final: int | None = None
        """After the last step, the checksum of all weights that the sites agreed on."""
        self._fingerprint = fingerprint(trainer.config, self.outer.units)

    def state_dict(self) -> dict[str, Any]:
        self._read_tokens()
        offers = [asdict(offer) for offer in self._offers]
        kept = {"offers": offers, "tokens": self._tokens, "nonfinite": self._nonfinite}
        return {**asdict(self._progress), **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        was, now = len(state_dict["versions"]), self._config.fragments
        need(was == now, "sites.fragments", now, f"need {was}, as in the checkpoint")
        self._has_begun = True
        # What was held has to be fetched again.
        fresh = {"holds": (), "refuses": ()}
        self._offers = [Offer(**{**offer, **fresh}) for offer in state_dict["offers"]]
        self._nonfinite = state_dict.get("nonfinite", self._nonfinite)
        self._tokens, self._progress = state_dict["tokens"], SiteProgress.of(state_dict)

    # Start and end

    def at_start(self, trainer: Trainer) -> None:
        self._step, self._loader = trainer.step, trainer.loader
        if not self._has_begun:
            self.outer.begin()
        self._endpoint = Endpoint(
            self._config, self._world, trainer.engine.ledger, self.outer, self._place
        )
        if trainer.step >= trainer.last_step:
            return
        self._want()
        for offer in self._offers:
            fragment = self.outer.fragment_of(offer.event)
            self._endpoint.publish(offer.event, self.outer.encode_again(fragment))
        source = int(self._world.broadcast_from_rank_0(self._meet))
        if source >= 0:
            self._adopt(trainer, [source], "other sites have gone on")
            trainer.engine.restore(has_published=False)

    def at_end(self, trainer: Trainer) -> None:
        if not hasattr(self, "_endpoint"):
            return  # the run was asked to stop before it began
        self._world.run_on_all(self._wait_for_others)
        self._endpoint.close()

    def on_error(self, trainer: Trainer, error: Exception) -> None:
        if hasattr(self, "_endpoint"):
            self._endpoint.close()

    def _place(self) -> Header:
        """What this site trains, and where it is."""
        offers = [offer.step for offer in self._offers]
        own = {"fingerprint": self._fingerprint, "step": self._step, "offers": offers}
        own["final"] = self._final
        return own | asdict(self._progress) | {"data": self._loader.position(self._step)}

    def _meet(self) -> str:
        """The site that has seen most exchanges, if those are more than here, else -1."""
        rounds, seconds = self._endpoint.rounds, self._config.deadline_seconds
        seen = meet(rounds, self._fingerprint, seconds, self._info)
        newest = max(seen, key=lambda site: (seen[site], -site), default=-1)
        return str(newest if seen.get(newest, 0) > sum(self._progress.versions) else -1)

    def _wait_for_others(self) -> None:
        """Others may need the last decisions and, at the end of the run, messages and weights."""
        rounds, seconds = self._endpoint.rounds, self._config.deadline_seconds
        final, over = self._final, sum(self._progress.versions)
        if self._world.rank != 0:
            return
        if final is not None:
            wait_for_others(rounds, seconds, lambda place: place["final"] == final)
        else:
            seconds = min(seconds, STOP_SECONDS)
            wait_for_others(rounds, seconds, lambda place: sum(place["versions"]) >= over)

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
        for offer in self._offers:
            if len(offer.holds) + len(offer.refuses) <= len(self._endpoint.others):
                self._announce(offer)
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
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        """Compare the weights with those of other sites once more: no exchange would do it."""
        own = self._final = self._checksum(range(self._config.fragments))
        text = self._world.broadcast_from_rank_0(self._ask_finals)
        found = {int(site): checksum for site, checksum in json.loads(text).items()}
        common = common_checksum({**found, self._config.number: own})
        if own != common:
            sources = [site for site, checksum in found.items() if checksum == common]
            self._adopt(trainer, sorted(sources), DIFFERS)
            self._final = common

    def _ask_finals(self) -> str:
        rounds, seconds = self._endpoint.rounds, self._config.deadline_seconds
        found = wait_for_others(rounds, seconds, lambda place: place["final"] is not None)
        return json.dumps({site: place["final"] for site, place in found.items()})

    def _checksum(self, fragments: Iterable[int]) -> int:
        """Of the weights of these fragments on all ranks."""
        own = sum((self.outer.checksum(fragment) for fragment in fragments), torch.tensor(0))
        return int(self._world.total(own).item())

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
        messages = self.outer.encode(fragment)
        is_finite = self._world.all_true(self.outer.is_sendable(fragment))
        tokens = self._tokens[fragment] if is_finite else 0.0
        offer = Offer(progress.next_event, step, tokens)
        self._tokens[fragment], self._is_waited_for = 0.0, False
        with self._endpoint.lock:
            progress.next_event, progress.last_step = offer.event + 1, step
            self._offers.append(offer)
        if is_finite:
            self._nonfinite[fragment] = 0
            self._endpoint.publish(offer.event, messages)
        else:
            self._undo(fragment, step, trainer.config.train.nonfinite_limit)
        self._want()
        self._announce(offer)

    def _undo(self, fragment: int, step: int, limit: int) -> None:
        """Go back to the common weights, because this site's change is not finite. Raises RunFailed
        if it has not been so for `limit` exchanges."""
        self._nonfinite[fragment] += 1
        if self._nonfinite[fragment] >= limit:
            raise RunFailed(
                f"sites: step {step}: the last {limit} changes of the weights were not finite "
                "(train.nonfinite_limit)"
            )
        self.outer.undo(fragment)
        self._info(
            f"sites: step {step}: the change of site {self._config.number}, this one, is not "
            "finite: not sent, going on from the common weights"
        )

    def _announce(self, offer: Offer) -> None:
        """Tell the other sites which messages are here, beside the steps of the delay."""
        held, refused = self._held(offer.event)
        for site in sorted(refused - set(offer.refuses)):
            self._info(
                f"sites: step {offer.step}: the message of site {site} is refused, because it is "
                "not finite or misshapen"
            )
        holds, refuses = tuple(sorted(held | {self._config.number})), tuple(sorted(refused))
        if (holds, refuses) != (offer.holds, offer.refuses):
            offer.holds, offer.refuses = holds, refuses
            report = self._report(offer)
            if self._world.rank == 0:
                self._endpoint.rounds.post(report)

    def _report(self, offer: Offer) -> Report:
        if offer.checksum is None:
            offer.checksum = self._checksum([self.outer.fragment_of(offer.event)])
        values = offer.event, self._config.number, offer.step, offer.tokens, offer.checksum
        return Report(*values, offer.holds, offer.refuses)

    def _want(self) -> None:
        """Fetch what is needed now, and the next messages, which say whether others wait."""
        events = {offer.event for offer in self._offers}
        self._endpoint.fetcher.want(events | {self._progress.next_event})

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the decision about the oldest exchange, and follow it."""
        offer, own = self._offers[0], self._config.number
        fragment = self.outer.fragment_of(offer.event)
        with trainer.engine.ledger.waiting("sites"), self._endpoint.fetcher.hurrying():
            decision = self._decide(offer)
        sites = len(self._config.addresses)
        if len(decision.tokens) < sites or self._present != decision.tokens.keys():
            self._info(f"sites: step {offer.step}: {describe(decision, sites)}")
        self._present = set(decision.tokens)
        others = set(decision.tokens) - {own}
        differs = decision.checksum != offer.checksum
        if others and (differs or not others <= self._held(offer.event)[0]):
            why = DIFFERS if differs else "messages of others are missing"
            self._adopt(trainer, sorted(others), why)
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

    def _decide(self, offer: Offer) -> Decision:
        """The decision about an exchange, the same on all ranks."""
        quiet_until = time.monotonic() + QUIET_SECONDS
        while True:
            self._announce(offer)
            if time.monotonic() > quiet_until:
                here = offer.holds + offer.refuses
                missing = ", ".join(str(n) for n in self._endpoint.others if n not in here)
                whom = f"site {missing}" if missing else "others to have all messages"
                self._info(f"sites: step {offer.step}: waiting for {whom}")
                quiet_until = math.inf
            text = self._world.broadcast_from_rank_0(partial(self._resolve, self._report(offer)))
            if text:
                return Decision.from_json(json.loads(text))
            time.sleep(PAUSE_SECONDS)

    def _resolve(self, report: Report) -> str:
        decision = self._endpoint.rounds.resolve(report)
        return "" if decision is None else json.dumps(asdict(decision))

    def _held(self, event: int) -> tuple[set[int], set[int]]:
        """The other sites whose messages all ranks hold, and those whose message some rank
        refuses."""
        fetcher, others = self._endpoint.fetcher, self._endpoint.others
        held, refused = set(fetcher.held(event)), set(fetcher.refused(event))
        flags = [[n not in held, n in refused] for n in others]
        values = torch.tensor(flags, dtype=torch.float64, device=self._world.device)
        pairs = self._world.maximum(values.flatten()).view(-1, 2).tolist()
        numbered = list(zip(others, pairs, strict=True))
        return (
            {n for n, (is_missing, _) in numbered if not is_missing},
            {n for n, (_, is_refused) in numbered if is_refused},
        )

    def _apply(self, offer: Offer, decision: Decision) -> None:
        """Move the weights by the mean of the changes."""
        fetcher, own = self._endpoint.fetcher, self._config.number
        parts = {n: fetcher.parts(offer.event, n) for n in decision.tokens if n != own}
        for place, index in enumerate(self.outer.fragments[self.outer.fragment_of(offer.event)]):
            unit = self.outer.units[index]
            device = self.outer.weights[index].device
            changes = {
                n: self._endpoint.change(index, place, found, device) for n, found in parts.items()
            }
            if own in decision.tokens:
                changes[own] = self.outer.sent[index]
            mean = mean_change(changes, decision.tokens)
            unit.hierarchy.broadcast_to_replicas([mean], unit.placement.optimizer)
            self.outer.update(index, mean)

    # Coming back

    def _adopt(self, trainer: Trainer, sources: Sequence[int], why: str) -> None:
        """Go on with the weights of one of other sites, at its place in the run. What this site has
        not sent is lost. Raises PeersLost."""
        copied = self._copy_one(sources)
        place = copied.place
        with self._endpoint.lock:
            for index, state in copied.states.items():
                self.outer.adopt(index, *state.to(self.outer.weights[index].device))
            self._progress = SiteProgress.of(place)
            first = self._progress.next_event - len(place["offers"])
            self._offers = [Offer(first + i, step, 0.0) for i, step in enumerate(place["offers"])]
        self._endpoint.rounds.forget_from(first)
        self._tokens = [0.0] * self._config.fragments
        self._fresh_tokens.zero_()
        trainer.loader.resume_at(place["step"], tuple(place["data"]))
        trainer.step = min(max(trainer.step, place["step"]), trainer.last_step - 1)
        self._want()
        self._info(
            f"sites: step {trainer.step}: {why}, going on with the weights of site {copied.source}"
        )

    def _copy_one(self, sources: Sequence[int]) -> SiteCopy:
        """A whole copy of one of these sites. Raises PeersLost after the deadline without any
        progress."""
        seconds = self._config.deadline_seconds
        late = time.monotonic() + seconds
        copies = [SiteCopy(self._world, self._endpoint, source) for source in sources]
        for copied in itertools.cycle(copies):
            if copied.update():
                late = time.monotonic() + seconds
            if copied.is_whole:
                return copied
            if not self._world.all_true(time.monotonic() < late):
                break
            time.sleep(PAUSE_SECONDS)
        names = ", ".join(map(str, sources))
        raise PeersLost(f"sites: no weights from site {names}, start again")
