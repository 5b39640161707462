"""FedAsync: every model that arrives is mixed into the global one at once."""

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.errors import check_number
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.context import Exchange


class FedAsync(FedBuff):
    r"""Mix each node's model into the global one when it arrives, less the staler it is.

    .. math:: w \leftarrow (1 - \alpha_s) w + \alpha_s w_i, \qquad \alpha_s = \alpha (1 + s)^{-a}

    Parameters
    ----------
    strategy : Strategy, optional
        What takes the mixed model; FedAvg if left out.
    concurrency : int, optional
        Nodes that train at the same time, drawn uniformly from the idle ones; None: all online.
    mixing : float
        alpha in (0, 1].
    staleness : {"sqrt", "none"} or float
        Exponent a: 1/2, 0, or a number.
    seed : int
        Of the draw of nodes.

    Raises
    ------
    ValueError
        If a setting is out of range, or for the reasons of :class:`FedBuff`.

    Notes
    -----
    No ``FedBuff(buffer_size=1)``, which adds the update to the newest model: here the model of a
    node pulls the newest one back to where the node started. All floats are mixed, running
    statistics as well; integers are the node's. The paper's nodes hold a proximal term: give
    ``FedProx`` inside. Its staleness is of the polynomial kind, its defaults alpha = 0.6, a = 1/2.

    References
    ----------
    Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020 (arXiv 2019).

    Examples
    --------
    >>> strategy = FedAsync(concurrency=10, mixing=0.6)
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        mixing: float = 0.6,
        staleness: str | float = "sqrt",
        seed: int = 0,
    ) -> None:
        self.mixing = check_number("mixing", mixing, "(0, 1]")
        super().__init__(
            strategy,
            concurrency=concurrency,
            buffer_size=1,
            staleness=staleness,
            weighting="equal",
            seed=seed,
        )

    def _rebased(self, context: Exchange, reply: Message, scale: float) -> Message:
        """Mix a node's model with the present one."""
        now = context.arrays
        return with_update(reply, now, now, self.mixing * scale, ())
