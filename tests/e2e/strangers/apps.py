"""The public apps, and what a user changes in each for a method: lines as README has them.

A diff is applied line by line: each line that stays (blank in front) or goes (minus) is found by its
text alone, below the one before; a line with a plus comes after it, indented alike. ``{}`` is the
method's strategy around ``strategy``.
"""

import json
from typing import NamedTuple


class Source(NamedTuple):
    """A public repository at a commit, and the folder into which ``fetch`` copies it."""

    address: str
    commit: str
    folder: str


FLOWER = Source(
    "https://github.com/adap/flower", "fdef7afb1dca3030553be302366cfd285ed6632c", "flower"
)
BENCHMARK = Source(
    "https://github.com/flwrlabs/flower-hub-benchmark",
    "c0d28977610bcadd3f6caa12ad5e9408fe8462d7",
    "flower-hub-benchmark",
)
FLSPAM = Source(
    "https://github.com/LavalAlexandre/flspam", "2972da2d85395926ddb5b76e93cbc5a703503372", "flspam"
)


class Method(NamedTuple):
    """A method: its strategy, and rounds in which as many nodes train as in FedAvg's."""

    wrapped: str
    rounds: int = 3


METHODS = {
    "FedAvg": Method("strategy"),
    "FedSlice": Method("FedSlice(strategy)"),
    "TiFL": Method("TiFL(strategy, clients_per_round=2, num_tiers=2)", rounds=6),
    "Mercury": Method("strategy"),
    "PGD": Method("strategy"),
    "TopLoss": Method("BiasedLocalSGD(strategy, fast_steps=24, gamma=1)"),
    "CDGraB": Method("CDGraB(strategy)"),
}
IMPORTS = {"FedSlice": "FedSlice", "TiFL": "TiFL", "TopLoss": "BiasedLocalSGD", "CDGraB": "CDGraB"}
SAMPLERS = {
    "Mercury": "MercurySampler",
    "PGD": "PGDSampler",
    "TopLoss": "TopLossSampler",
    "CDGraB": "OrderedSampler",
}
WITH_MODEL = ("PGD", "CDGraB")
"""Samplers that read gradients."""


class App(NamedTuple):
    """An app as its author wrote it, and the lines that change in it."""

    kind: str
    source: Source
    folder: str
    package: str
    needs: tuple[str, ...]
    score: tuple[str, str]
    """Where the result has it, and its name; a name with ``loss`` is better if lower."""
    start: str = ""
    """The diff that puts ``strategy = {}`` before the start."""
    loader: str = ""
    """The diff of the ClientApp that wraps the loader."""
    server: str = "from flwr.serverapp import Grid, ServerApp"
    """Line of the ServerApp below which the strategy is imported."""
    node: str = ""
    """The diff of the ClientApp for the mod, if not as in most apps."""
    sampler: str = ""
    """Which of METHODS is this app's sampler, if any."""
    criterion: dict[str, str] = {}
    here: dict[str, str] = {}
    """What makes the app small, or run without a hub."""
    everyone: dict[str, str] = {}
    """Lines without ``fraction_train``: in each run, and lines to change for FedSlice and TiFL."""
    config: str = ""
    rounds_key: str = "num-server-rounds"
    data: str = ""
    """Name of what makes files of data."""

    def changes_for(self, method: str) -> list[tuple[str, str]]:
        """Return a method's diffs, each with its file."""
        if method == "FedAvg":
            return []
        client, server = f"{self.package}/client_app.py", f"{self.package}/server_app.py"
        found = [(client, self.node or MOD)]
        if name := IMPORTS.get(method):
            taken = f" {self.server}\n+from flwr_hetero.strategy import {name}"
            found += [(server, taken), (server, self.start)]
        if method in SAMPLERS:
            kind, model = SAMPLERS[method], ", model=model" if method in WITH_MODEL else ""
            taken = f" {HETERO}\n+from flwr_hetero.sampler import {kind}"
            loader = self.loader.replace(", msg)", f", msg, sampler={kind}{model})")
            found += [(client, taken), (client, loader), *self.criterion.items()]
        elif method != "TiFL":
            found.append((client, self.loader))
        return found

    def files(self) -> dict[str, str]:
        """Return the files of data that the app reads beside its code."""
        return FILES[self.data]() if self.data else {}


def messages() -> dict[str, str]:
    """Make the messages of four people, and spam."""
    ham = [
        {"text": f"good{i % 20} good{(i * 7) % 20} bad{i % 5}", "label": 0, "main_uuid": f"p{i % 4}"}
        for i in range(600)
    ]
    spam = [{"text": f"bad{i % 20} bad{(i * 3) % 20} good{i % 5}", "label": 1} for i in range(200)]
    return {"data/ham_messages.json": json.dumps(ham), "data/spam_messages.json": json.dumps(spam)}


def older_server() -> dict[str, str]:
    """Write docs/older-apps.md's server for clients of the older API."""
    return {"fl_dp_sa/server_app.py": OLDER_SERVER}


OLDER_SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr_hetero.older import OlderClients

from fl_dp_sa.task import Net, get_weights

app = ServerApp()


@app.main()
def main(grid: Grid, context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    # start
    arrays = ArrayRecord(get_weights(Net()))
    strategy.start(grid=OlderClients(grid), initial_arrays=arrays, num_rounds=rounds)
"""
FILES = {"messages": messages, "older server": older_server}
HETERO = "from flwr_hetero.mod import hetero"
MOD = f"""
 from flwr.clientapp import ClientApp
+{HETERO}
-app = ClientApp()
+app = ClientApp(mods=[hetero])
"""
START = """
 # Start strategy, run FedAvg for `num_rounds`
+strategy = {}
"""
TRAINLOADER = "trainloader, _ = load_data(partition_id, num_partitions, batch_size)"
WRAPPED = "+trainloader = hetero.batches(trainloader, msg)"
BEFORE_RATE = f"""
-new_lr = cosine_annealing(
{WRAPPED}
+new_lr = cosine_annealing(
"""
HUB = ("torch", "datasets", "flwr_datasets", "torchvision")
ACCURACY = ("evaluate_metrics_serverapp", "accuracy")
CLIENT_ACCURACY = ("evaluate_metrics_clientapp", "accuracy")


RECORDS = """
-from flwr.common.record.arrayrecord import ArrayRecord
-from flwr.common.record.configrecord import ConfigRecord
-from flwr.common.record.metricrecord import MetricRecord
-from flwr.common.record.recorddict import RecordDict
-from flwr.server.grid.grid import Grid
+from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
+from flwr.serverapp import Grid
"""
"""Names that Flower 1.41 has elsewhere."""
PLAIN = """
 from flwr.serverapp import Grid, ServerApp
+from flwr.serverapp.strategy import FedAvg
{anchor}
+strategy = FedAvg(fraction_evaluate={part})
"""
"""FedAvg itself where the app's strategy has a ``start`` of its own."""
LOOP = """
-criterion = torch.nn.CrossEntropyLoss().to(device)
+criterion = trainloader.criterion()
"""
"""The loss of a sampler in a plain loop."""

APPS = {
    "quickstart-pytorch": App(
        *("plain loop", FLOWER, "examples/quickstart-pytorch", "pytorchexample", HUB, ACCURACY),
        start=START,
        loader=f" {TRAINLOADER}\n{WRAPPED}",
        sampler="TopLoss",
        criterion={"pytorchexample/task.py": LOOP},
        config="fraction-evaluate=1.0 learning-rate=0.05",
    ),
    "advanced-pytorch": App(
        "state on nodes, own strategy",
        *(FLOWER, "examples/advanced-pytorch", "pytorch_example", (*HUB, "wandb"), ACCURACY),
        start=START,
        loader=f" {TRAINLOADER.replace(', batch_size', '')}\n{WRAPPED}",
        sampler="Mercury",
        criterion={"pytorch_example/task.py": LOOP},
        everyone={
            "pytorch_example/server_app.py": PLAIN.format(
                anchor=" strategy.set_save_path_and_run_dir(save_path, run_dir)", part=1.0
            )
        },
        here={
            "pytorch_example/task.py": """
-from flwr.common.typing import UserConfig
+from flwr.app.user_config import UserConfig
"""
        },
        config="fraction-train=1.0 fraction-evaluate=1.0",
    ),
    "quickstart-pytorch-lightning": App(
        "Lightning",
        *(FLOWER, "examples/quickstart-pytorch-lightning", "pytorchlightning_example"),
        (*HUB, "pytorch_lightning"),
        ("evaluate_metrics_clientapp", "eval_loss"),
        start=START,
        loader="""
 train_loader, val_loader, _ = load_data(partition_id, num_partitions)
+train_loader = hetero.batches(train_loader, msg)
""",
        sampler="CDGraB",
        criterion={
            "pytorchlightning_example/client_app.py": """
+model.criterion = train_loader.criterion(torch.nn.MSELoss())
""",
            "pytorchlightning_example/task.py": """
 x_hat = self.decoder(z)
-loss = F.mse_loss(x_hat, x)
+loss = self.criterion(x_hat, x)
""",
        },
        everyone={
            "pytorchlightning_example/server_app.py": """
-strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.5)
+strategy = FedAvg()
""",
        },
        here={"pytorchlightning_example/client_app.py": " import pytorch_lightning as pl\n+import torch"},
    ),
    "quickstart-huggingface": App(
        "Hugging Face's model in a loop, weighted by batches",
        *(FLOWER, "examples/quickstart-huggingface", "huggingface_example"),
        ("torch", "datasets", "flwr_datasets", "transformers", "evaluate"),
        CLIENT_ACCURACY,
        start=" # Start the strategy\n+strategy = {}",
        loader=f" # Train the model on local data\n{WRAPPED}",
        sampler="PGD",
        criterion={
            "huggingface_example/task.py": """
-loss = outputs.loss
+loss = trainloader.criterion()(outputs.logits, batch["labels"])
""",
        },
        here={
            "huggingface_example/task.py": """
-optimizer = AdamW(net.parameters(), lr=5e-5)
+optimizer = AdamW(net.parameters(), lr=1e-3)
"""
        },
        config="fraction-train=1.0 fraction-evaluate=1.0",
    ),
    "quickstart-sklearn": App(
        *("scikit-learn", FLOWER, "examples/quickstart-sklearn", "sklearnexample"),
        *(("sklearn", "datasets", "flwr_datasets"), CLIENT_ACCURACY),
        start=START,
        loader="""
 X_train, y_train, _, _ = load_data(partition_id, num_partitions)
+model.max_iter = hetero.num_steps(msg, default=1, batch_size=len(X_train))
""",
    ),
    "quickstart-jax": App(
        *("JAX", FLOWER, "examples/quickstart-jax", "jaxexample"),
        *(("jax", "flax", "optax", "datasets", "flwr_datasets"),),
        ("evaluate_metrics_clientapp", "eval_acc"),
        start=START,
        loader=f" {TRAINLOADER}\n{WRAPPED}",
        everyone={"jaxexample/server_app.py": "-fraction_train=0.1,"},
        here={
            "jaxexample/task.py": """
 state = update_model(state, grads)
+__import__("strangers_kit").COUNT.trained(len(batch_labels))
-.batch(batch_size, num_proc=2, drop_last_batch=True)
+.batch(batch_size, drop_last_batch=True)
-.batch(batch_size, num_proc=2, drop_last_batch=True)
+.batch(batch_size, drop_last_batch=True)
"""
        },
        config="fraction-evaluate=1.0 learning-rate=0.05 batch-size=32",
    ),
    "opacus": App(
        *("Opacus", FLOWER, "examples/opacus", "opacus_fl", (*HUB, "opacus"), CLIENT_ACCURACY),
        start="""
 train_metrics_aggr_fn=aggregate_train,
 )
+strategy = {}
""",
        loader="""
 max_grad_norm=max_grad_norm,
 )
+private_train_loader = hetero.batches(private_train_loader, msg)
""",
        here={
            "opacus_fl/client_app.py": """
-optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
+optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
        },
    ),
    "federated-vae": App(
        *("two losses", FLOWER, "examples/federated-vae", "fedvaeexample", HUB),
        ("evaluate_metrics_clientapp", "loss"),
        start=START,
        loader=f" {TRAINLOADER.replace(', batch_size', '')}\n{WRAPPED}",
        config="learning-rate=1.0",
    ),
    "flowertune-vit": App(
        *("frozen body", FLOWER, "examples/flowertune-vit", "vitexample", HUB, ACCURACY),
        start=START,
        loader=f" # Load model\n{WRAPPED}",
        sampler="Mercury",
        criterion={
            "vitexample/task.py": """
-criterion = torch.nn.CrossEntropyLoss()
+criterion = trainloader.criterion()
"""
        },
        everyone={
            "vitexample/server_app.py": "-fraction_train=0.5,  # Sample 50% of available clients"
        },
        config="num-classes=4",
    ),
    "fl-tabular": App(
        *("table, weighted by batches", FLOWER, "examples/fl-tabular", "fltabular"),
        ("torch", "datasets", "flwr_datasets", "sklearn"),
        CLIENT_ACCURACY,
        start=START,
        loader=" # Load model\n+train_loader = hetero.batches(train_loader, msg)",
    ),
    "custom-mods": App(
        "mods of its own",
        *(FLOWER, "examples/custom-mods", "custom_mods", (*HUB, "tensorboard", "wandb"), ACCURACY),
        start=START,
        node="""
 from flwr.clientapp import ClientApp
+from flwr_hetero.mod import hetero
 mods=[
+hetero,
""",
        loader=f" {TRAINLOADER}\n{WRAPPED}",
        sampler="PGD",
        criterion={"custom_mods/task.py": LOOP},
        here={
            "custom_mods/mods.py": """
-from flwr.client.typing import ClientAppCallable, Mod
+from typing import Any as ClientAppCallable, Any as Mod
"""
        },
        config="fraction-evaluate=1.0 learning-rate=0.05",
    ),
    "fl-dp-sa": App(
        "NumPyClient, passes that do not train",
        *(FLOWER, "examples/fl-dp-sa", "fl_dp_sa", HUB, CLIENT_ACCURACY),
        start=" # start\n+strategy = {}",
        node="""
 from flwr.clientapp import ClientApp
+from flwr_hetero.mod import hetero
-mods=[],
+mods=[hetero],
""",
        loader="""
-self.trainloader,
+hetero.batches(self.trainloader, config),
""",
        data="older server",
        here={
            "fl_dp_sa/client_app.py": """
-mods=[
+mods=[],
-secaggplus_mod,
-fixedclipping_mod,
-],
"""
        },
    ),
    "fed-fin-fraud": App(
        "class weights, two epochs, drawn with replacement, own strategy",
        *(BENCHMARK, "fed-fin-fraud", "fed_fraud"),
        ("torch", "datasets", "flwr_datasets", "sklearn"),
        ("evaluate_metrics_serverapp", "pr_auc_at_0.5"),
        start=" strategy = FedAvg(fraction_evaluate=0.0)\n+strategy = {}",
        everyone={"fed_fraud/server_app.py": PLAIN.format(anchor=" context=context,\n )", part=0.0)},
        loader=BEFORE_RATE,
        here={"fed_fraud/benchmarking.py": RECORDS},
        config="batch-size=64 learning-rate-max=1e-3",
    ),
    "fed-legal-llm": App(
        *("LoRA of a language model", BENCHMARK, "fed-legal-llm", "fed_legal_llm"),
        ("torch", "datasets", "flwr_datasets", "transformers", "peft"),
        ("train_metrics_clientapp", "train_loss"),
        start=" strategy = FedAvg(fraction_evaluate=0.0)\n+strategy = {}",
        everyone={"fed_legal_llm/server_app.py": PLAIN.format(anchor=" context=context,\n )", part=0.0)},
        loader=BEFORE_RATE,
        here={"fed_legal_llm/benchmarking.py": RECORDS},
        config="batch-size=8 learning-rate-max=1e-2 load-in-4bit=false torch-dtype='float32' "
        "show-progress=false eval-max-new-tokens=4",
    ),
    "flspam": App(
        "LoRA, class weights, schedule, GradScaler, a loop of start",
        *(FLSPAM, ".", "src", ("torch", "transformers", "peft", "sklearn", "wandb")),
        ("evaluate_metrics_clientapp", "eval_acc"),
        server="from flwr.serverapp import Grid",
        node="""
 from flwr.client import ClientApp
+from flwr_hetero.mod import hetero
-app = ClientApp()
+app = ClientApp(mods=[hetero])
""",
        start="""
 # Run federated learning round by round with checkpointing
+strategy = {}
""",
        loader=f"""
 spam_alpha=spam_alpha,
 )
{WRAPPED}
""",
        config="fraction-train=1.0 lr=1e-2 adversarial-rounds=''",
        data="messages",
    ),
}
KNOWN: dict[tuple[str, str], str] = {}
"""App and method that do not work as they should, and why."""
