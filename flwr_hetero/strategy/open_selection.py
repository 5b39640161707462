"""Make a wrapped strategy train exactly the nodes that it is shown."""

from typing import TYPE_CHECKING, Any

from flwr.serverapp.strategy import FedAvg

from flwr_hetero.core.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.strategy.wrapper import Wrapper


def open_selection(
    wrapper: "Wrapper", clients_per_round: int, *, evaluate: bool, shrink: str
) -> bool:
    """Check the innermost strategy's own sampling and open it.

    Flower's ``sample_nodes`` waits for ever for nodes that a view hides, so anything that
    could make it wait is refused here, and the minima are set to 1.

    Parameters
    ----------
    wrapper : Wrapper
        The one that selects.
    clients_per_round : int
        Nodes that the strategy will be shown.
    evaluate : bool
        Whether federated evaluation is needed whatever the strategy's ``fraction_evaluate``.
    shrink : str
        The ``on_small_tier`` setting.

    Returns
    -------
    bool
        Whether the strategy wanted federated evaluation by itself.

    Raises
    ------
    ValueError
        Names the setting of the wrapped strategy and the cure.
    """
    leaf: Any = wrapper.leaf
    kind = type(leaf).__name__
    if not isinstance(leaf, FedAvg) or kind == "FedXgbCyclic":
        raise invalid(
            "strategy",
            kind,
            "derive from FedAvg and leave the choice of nodes open",
            "FedXgbCyclic and strategies with a selection of their own do not fit",
        )
    if leaf.fraction_train != 1.0:
        raise invalid(
            f"{kind}.fraction_train",
            leaf.fraction_train,
            "be 1.0 inside TiFL",
            "leave it out and set clients_per_round",
        )
    for minimum in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        wanted = getattr(leaf, minimum)
        if wanted > max(clients_per_round, 2):  # 2 is Flower's default: nobody asked for it
            raise invalid(
                f"{kind}.{minimum}",
                wanted,
                f"be at most clients_per_round={clients_per_round}",
                "it would wait for ever for nodes that TiFL does not show; leave it out",
            )
    for outer in wrapper.chain():
        accountant = getattr(outer, "accountant", None)
        asked = getattr(outer, "num_sampled_clients", clients_per_round)
        if accountant is not None and (asked != clients_per_round or shrink == "shrink"):
            raise invalid(
                f"{type(outer).__name__}.num_sampled_clients",
                asked,
                f"equal clients_per_round={clients_per_round}, with on_small_tier borrow or skip",
                "privacy accounting needs rounds of one size",
            )
    wanted_evaluation = bool(leaf.fraction_evaluate > 0)
    leaf.min_train_nodes = leaf.min_available_nodes = 1
    if wanted_evaluation or evaluate:
        leaf.min_evaluate_nodes = 1
    if evaluate and not wanted_evaluation:
        leaf.fraction_evaluate = 1.0
    return wanted_evaluation
