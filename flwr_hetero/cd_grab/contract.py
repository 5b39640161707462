"""What nodes must do for orders and for herding bounds."""

from flwr_hetero import keys
from flwr_hetero.server.contract import Contract

_LINES = (
    "    from flwr_hetero.mod import hetero\n"
    "    from flwr_hetero.sampler import OrderedSampler\n"
    "    app = ClientApp(mods=[hetero])  # adds to the reply what the sampler has to say\n"
    "    loader = hetero.batches(loader, msg, sampler=OrderedSampler, model=model)\n"
    "    criterion = loader.criterion()  # in place of the loss function"
)
ORDERS = Contract(keys.ORDER, "what it saw of its order", _LINES, "which stay with their own order")
SKETCHES = Contract(
    keys.HERDING, "sketches of its units' gradients", _LINES, "which are not in the bound"
)
