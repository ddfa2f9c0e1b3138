"""Copy the state of another site, as far as this rank holds it."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from megafrontier.parallel.world import World
from megafrontier.sites.directory import copy_overlap
from megafrontier.sites.endpoint import Endpoint
from megafrontier.sites.fetch import MessagePart
from megafrontier.sites.transport import Header


class SiteCopy:
    """A copy of another site's state and place. All ranks have one, and call its methods together.

    This site's own state stays as it is meanwhile, because others may ask for it.

    states: by the index of a unit, weights and momentum [2, n], on the host. place: where the other
    site was when all of this was its state.
    """

    def __init__(self, world: World, endpoint: Endpoint, source: int) -> None:
        self.source = source
        self.place: Header = {}
        self.states: dict[int, Tensor] = {}
        self._world, self._endpoint = world, endpoint
        self._versions: dict[int, int] = {}
        """Of the fragments that are here."""

    def update(self) -> bool:
        """Copy the fragments that are not here, or have changed. Returns whether the copy made
        progress; `is_whole` says whether it is complete."""
        versions, has_progress = self._ask_place().get("versions", []), False
        for fragment, version in enumerate(versions):
            if self._versions.get(fragment) != version and self._copy(fragment):
                has_progress = True
        self.place = self._ask_place()
        return has_progress

    @property
    def is_whole(self) -> bool:
        """Whether the other site is still where this copy was made."""
        versions = self.place.get("versions", [])
        return bool(versions) and dict(enumerate(versions)) == self._versions

    def _ask_place(self) -> Header:
        def ask() -> str:
            return json.dumps(self._endpoint.rounds.ask(self.source, {"ask": "hello"}) or {})

        place: Header = json.loads(self._world.broadcast_from_rank_0(ask))
        return place

    def _copy(self, fragment: int) -> bool:
        """Copy a fragment. False if the site does not answer, or went on in between."""
        parts = self._endpoint.fetch_state(self.source, fragment)
        versions = [part.version for part in parts or ()]
        bounds = [max(versions, default=-1), -min(versions, default=2**31)]
        own = torch.tensor([*bounds, float(parts is None)], dtype=torch.float64)
        newest, oldest, fails = self._world.maximum(own.to(self._world.device)).tolist()
        if fails or newest != -oldest:
            return False
        self._versions[fragment] = int(newest)
        for place, index in enumerate(self._endpoint.outer.fragments[fragment]):
            self.states[index] = self._assemble(index, place, parts or [])
        return True

    def _assemble(self, index: int, place: int, parts: Sequence[MessagePart]) -> Tensor:
        """The state of this rank's shard of a unit, the `place`th of its fragment."""
        outer = self._endpoint.outer
        unit, weights = outer.units[index], outer.weights[index]
        state = torch.zeros(2, len(weights), device=weights.device)
        for part, (start, _) in self._endpoint.covering(index, parts):
            values = part.messages[place].view(torch.float32).view(2, -1).to(weights.device)
            copy_overlap(state, unit.range[0], values, start)
        unit.hierarchy.broadcast_to_replicas([state], unit.placement.optimizer)
        return state.cpu()
