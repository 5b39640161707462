"""What nodes must do for orders and for herding bounds."""

from flwr_hetero import keys
from flwr_hetero.server.contract import Contract

_LINES = (
    "    from flwr_hetero.mod import follow, timing\n"
    "    from flwr_hetero.sampler import OrderedSampler, SampledLoss\n"
    "    app = ClientApp(mods=[timing])  # adds to the reply what the sampler has to say\n"
    "    loader = DataLoader(data, batch_sampler=OrderedSampler(len(data), batch_size))\n"
    "    follow(loader.batch_sampler, msg, context, model)  # the model that is trained\n"
    "    criterion = SampledLoss(loader.batch_sampler)  # in place of the loss function"
)
ORDERS = Contract(keys.ORDER, "what it saw of its order", _LINES, "which stay with their own order")
SKETCHES = Contract(
    keys.HERDING, "sketches of its units' gradients", _LINES, "which are not in the bound"
)
