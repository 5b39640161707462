"""What a node does: train, evaluate, and say how long its training takes."""

from flwr.clientapp import ClientApp

from flwr_hetero.mod import emulated_device
from flwr_hetero_studies.tasks.node import evaluate_node, profile_node, train_node

app = ClientApp(mods=[emulated_device])
app.train()(train_node)
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)
