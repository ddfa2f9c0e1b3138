"""Which sites take part in an exchange: all sites must come to the same answer.

Each site reports to the lowest-numbered site that answers, itself included. That one decides when
every site that it has heard from has reported and holds the messages of all others, or when the
deadline is over. No site is special: if the lowest one is gone, the next one decides. Two sites
that do not reach each other may decide differently. Their weights then differ, which the checksums
of the next exchange show, and the fewer of them take over the weights of the others.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megafrontier.sites.transport import Client, Header, Patience

PAUSE_SECONDS = 0.5
"""Between two looks for decisions beside training."""
FEW_WAIT = 1.5
"""How much longer than the deadline less than half of the sites wait for the others."""
NO_CHECKSUM = -1
"""Differs from that of any weights."""
KEPT = 64
"""Decisions that are remembered for sites that ask late."""


@dataclass(frozen=True)
class Report:
    """What a site says about an exchange."""

    event: int
    """The number of the exchange, from 0."""
    site: int
    step: int
    """The optimizer step after which it sent the change of its weights."""
    tokens: float
    """Tokens that the change comes from. 0: the site sends nothing."""
    checksum: int
    """Of the weights that all sites agreed on before."""
    holds: tuple[int, ...]
    """The sites whose messages all ranks of this one hold, itself included."""
    refuses: tuple[int, ...] = ()
    """The sites whose message some rank of this one refuses: nobody waits until it is held."""


@dataclass(frozen=True)
class Decision:
    """Who takes part in an exchange."""

    event: int
    tokens: Mapping[int, float]
    """Of the sites that take part, by their number."""
    step: int
    """The largest step of these sites."""
    checksum: int
    """Of the weights that they start from."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Decision":
        """From what JSON makes of the fields."""
        tokens = {int(site): count for site, count in values["tokens"].items()}
        return cls(values["event"], tokens, values["step"], values["checksum"])


@dataclass
class _Event:
    began: float = field(default_factory=time.monotonic)
    reports: dict[int, Report] = field(default_factory=dict)


class Rounds:
    """The decisions of one site. Its server's threads and its training use it.

    clients: by number, the other sites.
    """

    def __init__(self, number: int, clients: Mapping[int, Client], deadline: float) -> None:
        self.number, self._clients, self._deadline = number, clients, deadline
        self._lock = threading.Lock()
        self._events: dict[int, _Event] = {}
        self._decisions: dict[int, Decision] = {}
        self._heard = {number}
        """Sites that have reported since they were last left out."""
        self._patience = {site: Patience() for site in clients}
        self._open: dict[int, Report] = {}
        """Reports of this site about exchanges that are not decided."""
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._reached = -1
        """The newest exchange that this site has come to."""

    @property
    def others(self) -> list[int]:
        """The numbers of the other sites."""
        return sorted(self._clients)

    def hear(self, site: int) -> None:
        """Wait for this site in the next exchanges."""
        with self._lock:
            self._heard.add(site)

    def post(self, report: Report) -> None:
        """Resolve a report in a thread, in which it replaces an earlier one about its exchange."""
        with self._lock:
            self._open[report.event] = report
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="sites")
                self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(PAUSE_SECONDS):
            with self._lock:
                reports = [self._open[event] for event in sorted(self._open)]
            for report in reports:
                self.resolve(report)

    def resolve(self, report: Report) -> Decision | None:
        """Report to the site that decides, or decide. None if it is too early. Call it again."""
        with self._lock:
            self._reached = max(self._reached, report.event)
            self._heard.add(self.number)
            if (known := self._decisions.get(report.event)) is not None:
                return known
        for site in sorted(self._clients):
            if site > self.number:
                break
            if (answer := self.ask(site, {"ask": "report", **asdict(report)})) is not None:
                return self._remember(answer)
        return self._conclude(self.receive(report))

    def _conclude(self, decision: Decision | None) -> Decision | None:
        """The decision that counts, if one can be taken: another site may have decided before it
        became silent, and told some."""
        if decision is None:
            return None
        for site in sorted(self._clients):
            answer = self.ask(site, {"ask": "decision", "event": decision.event})
            if answer is not None and (earlier := self._remember(answer)) is not None:
                return earlier
        return self._remember(asdict(decision))

    def forget_from(self, event: int) -> None:
        """Forget the decisions about this exchange and later ones: this site goes on with the
        weights of another one, for which they do not hold."""
        with self._lock:
            self._open.clear()
            for taken in [found for found in self._decisions if found >= event]:
                del self._decisions[taken]

    def ask(self, site: int, header: Header) -> Header | None:
        """The answer of another site; None if it gave none now or in the last seconds."""
        return self._patience[site].ask(lambda: self._clients[site].request(header)[0])

    def why_silent(self, site: int) -> str:
        """Why a site did not answer the last time."""
        return self._patience[site].reason

    def answer(self, header: Header, first_open: int) -> Header:
        """The answer to `ask` of another site: a decision, or nothing yet. first_open: the oldest
        exchange that is not over here."""
        event = int(header["event"])
        with self._lock:
            known, is_late_here = self._decisions.get(event), self._reached < event
        if header["ask"] == "report":
            self.hear(header["site"])
        if known is None and event < first_open:
            # Over and forgotten: the other site needs the weights of this one.
            known = Decision(event, {self.number: 0.0}, 0, NO_CHECKSUM)
        elif known is None and header["ask"] == "report":
            fields = {key: value for key, value in header.items() if key != "ask"}
            for sites in ("holds", "refuses"):
                fields[sites] = tuple(fields.get(sites, ()))
            decision = self.receive(Report(**fields))
            # This site has not come to the exchange by the deadline: the others go on without it.
            known = self._conclude(decision) if is_late_here else None
        return {} if known is None else asdict(known)

    def receive(self, report: Report) -> Decision | None:
        """Take a report. Returns the decision, if it can be taken."""
        with self._lock:
            event = self._events.setdefault(report.event, _Event())
            event.reports[report.site] = report
            self._heard.add(report.site)
            # So that most sites decide first, whose work must not be lost for a lonely one's.
            are_few = 2 * len(event.reports) < len(self._clients) + 1
            deadline = self._deadline * (FEW_WAIT if are_few else 1)
            is_late = time.monotonic() - event.began > deadline
            reports = list(event.reports.values())
            senders = {found.site for found in reports if found.tokens > 0}
            is_complete = self._heard <= event.reports.keys() and all(
                senders <= {*found.holds, *found.refuses} for found in reports
            )
            return decide(reports) if is_complete or is_late else None

    def _remember(self, answer: Header) -> Decision | None:
        if not answer:
            return None
        decision = Decision.from_json(answer)
        with self._lock:
            # The first one counts, whichever thread it comes from.
            decision = self._decisions.setdefault(decision.event, decision)
            self._forget(decision)
        return decision

    def _forget(self, decision: Decision) -> None:
        event = self._events.get(decision.event, _Event())
        joined = {found.site for found in event.reports.values() if found.tokens == 0}
        self._heard = joined.union(decision.tokens)
        for reports in (self._events, self._open):
            for old in [event for event in reports if event <= decision.event]:
                del reports[old]
        for old in [event for event in self._decisions if event <= decision.event - KEPT]:
            del self._decisions[old]


def decide(reports: Sequence[Report]) -> Decision:
    """Who takes part: sites that start from the same weights, send something, and hold each other's
    messages. Of several sets of weights the one of most sites counts, then of the lowest number.
    """
    reports = sorted(reports, key=lambda report: report.site)
    common = common_checksum({report.site: report.checksum for report in reports})
    found = {r.site: r for r in reports if r.checksum == common and r.tokens > 0}
    while lacking := _least_held(found):
        del found[lacking[0]]
    step = max((report.step for report in found.values()), default=0)
    tokens = {site: report.tokens for site, report in found.items()}
    return Decision(reports[0].event, tokens, step, common)


def common_checksum(checksums: Mapping[int, int]) -> int:
    """That of most sites; of several the one of the lowest number."""
    return Counter(checksums[site] for site in sorted(checksums)).most_common(1)[0][0]


def _least_held(reports: Mapping[int, Report]) -> list[int]:
    """The site, if any, whose message most others lack; of two alike the one with larger number."""
    lacks = Counter[int]()
    for report in reports.values():
        lacks.update(set(reports) - set(report.holds))
    return [max(lacks, key=lambda site: (lacks[site], site))] if lacks else []


def describe(decision: Decision, sites: int) -> str:
    """One line about who takes part in an exchange."""
    present, absent = list[str](), list[str]()
    for site in range(sites):
        (present if site in decision.tokens else absent).append(str(site))
    of = (
        f"sites {', '.join(present)}" if len(present) > 1 else f"site {' '.join(present) or 'none'}"
    )
    without = f", without site {', '.join(absent)}" if absent else ""
    return f"exchange {decision.event} of {of}{without}"
