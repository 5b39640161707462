"""Draw the tier of a round and the nodes of it that are there (TiFL, section 4.3)."""

from collections.abc import Container, Set
from logging import WARNING
from typing import NamedTuple

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_hetero.strategy.roster import Roster
from flwr_hetero.strategy.tier_chooser import TierChooser
from flwr_hetero.strategy.tier_table import TierTable


class TierDraw(NamedTuple):
    """Who trains in a round.

    Parameters
    ----------
    tier : int or None
        The tier; None if there is nobody, or no credits.
    nodes : list of int
        Node ids.
    chances : ndarray of float64, shape (num_tiers,)
        Chance that each tier had in this draw.
    exhausted : bool
        Whether spent credits ended the draw.
    """

    tier: int | None
    nodes: list[int]
    chances: NDArray[np.float64]
    exhausted: bool = False


class Fleet(NamedTuple):
    """Who can be asked.

    Parameters
    ----------
    online : set of int
        Node ids that are there.
    roster : Roster
        Identities and node ids.
    barred : container of str
        Identities that must not be chosen.
    """

    online: Set[int]
    roster: Roster
    barred: Container[str] = ()


def draw_nodes(
    table: TierTable,
    chooser: TierChooser,
    fleet: Fleet,
    count: int,
    on_small_tier: str,
    rng: np.random.Generator,
) -> TierDraw:
    """Draw a tier, then nodes of it; a tier of which nobody is there is drawn around.

    Parameters
    ----------
    table : TierTable
        Who is in which tier.
    chooser : TierChooser
        Chances and credits; the tier that is taken has spent a credit afterwards.
    fleet : Fleet
        Who is there.
    count : int
        Nodes |C| wanted.
    on_small_tier : {"shrink", "borrow", "skip"}
        What to do if fewer are there.
    rng : np.random.Generator
        Source of chance.

    Returns
    -------
    TierDraw
        Without nodes if no tier has any, or if spent credits end the run.
    """
    possible = np.array([bool(members) for members in table.members])
    fullest = TierDraw(None, [], np.zeros(table.num_tiers))
    while (tier := chooser.choose(possible, rng)) is not None:
        lowest = 0 if on_small_tier == "borrow" else tier
        nodes = _pick(table, range(tier, lowest - 1, -1), fleet, count, rng)
        drawn = TierDraw(tier, nodes, chooser.chances(possible))
        if len(nodes) == count or (nodes and on_small_tier != "skip"):
            return _spend(chooser, drawn)
        fullest = max(fullest, drawn, key=lambda draw: len(draw.nodes))
        possible[tier] = False
    if fullest.nodes:
        log(WARNING, "TiFL: no tier has %d nodes online", count)
    return _spend(chooser, fullest._replace(exhausted=bool(possible.any())))


def sample_tiers(
    table: TierTable, fleet: Fleet, per_tier: int, rng: np.random.Generator
) -> list[int]:
    """Draw some nodes of every tier.

    Parameters
    ----------
    table : TierTable
        Who is in which tier.
    fleet : Fleet
        Who is there.
    per_tier : int
        Nodes wanted of each tier.
    rng : np.random.Generator
        Source of chance.

    Returns
    -------
    list of int
        Node ids, fastest tier first.
    """
    return [
        node_id
        for tier in range(table.num_tiers)
        for node_id in _pick(table, [tier], fleet, per_tier, rng)
    ]


def _pick(
    table: TierTable,
    tiers: range | list[int],
    fleet: Fleet,
    count: int,
    rng: np.random.Generator,
) -> list[int]:
    nodes: list[int] = []
    for tier in tiers:
        if len(nodes) < count:
            nodes += table.pick(
                tier, count - len(nodes), fleet.online, fleet.roster, fleet.barred, rng
            )
    return nodes


def _spend(chooser: TierChooser, drawn: TierDraw) -> TierDraw:
    if drawn.tier is not None and drawn.nodes:
        chooser.spend(drawn.tier)
    return drawn
