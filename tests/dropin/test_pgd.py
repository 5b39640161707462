"""PGD in a first Flower app, and in the trainers that other apps use."""

import numpy as np
import pytest
import torch
from dropin.patching import node_lines
from dropin.test_dropin import FAST, HERE, quickstart  # noqa: F401
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from flwr_hetero.fleet import LocalGrid
from flwr_hetero.mod import StepLoader, keep, timing
from flwr_hetero.sampler import PGDSampler, PriorityFeed, SampledLoss, sample_priorities

NUM, BATCH, EPOCHS = 52, 4, 2


def test_pgd_in_five_lines(quickstart, monkeypatch):  # noqa: F811
    assert node_lines((HERE / "pgd.diff").read_text()) <= 5
    passes, iterate = [], PriorityFeed.__iter__

    def spy(self):
        passes.append((self, []))
        for indices in iterate(self):
            passes[-1][1].extend(indices)
            yield indices

    monkeypatch.setattr(PriorityFeed, "__iter__", spy)
    rounds, epochs = 3, 2
    grid = quickstart("pgd.diff", rounds, **{"local-epochs": epochs})
    assert len(passes) == 4 * rounds * epochs
    for node in grid.get_node_ids():  # kept for the next round, and learnt from its own steps
        state = grid.context(node).state
        arrays, scalars = (state[f"flwr-hetero.sampler.{kind}"] for kind in ("arrays", "scalars"))
        assert scalars["batches"] == rounds * epochs * -(-scalars["num_samples"] // 16)
        assert np.isfinite(arrays["priority"].numpy()).mean() > 0.5
        assert arrays["gradient.classes.weight"].numpy().any()
    for feed, drawn in passes[-4:]:  # of the last round: no shuffle any more
        counts = np.bincount(drawn, minlength=feed.num_samples)
        assert counts.sum() == feed.num_samples
        assert counts.max() >= 2
        weights = feed.sampler.weights
        assert (weights.min() < 0.8) & (weights.max() > 1.2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mods", [[], [timing]])
def test_what_is_learnt_in_the_steps_asked_for_is_kept(mods, num_workers):
    client, num_steps, learnt = ClientApp(mods=mods), 9, []

    @client.train()
    def train(msg, context):
        model = nn.Linear(6, 2)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        feed = PriorityFeed(PGDSampler(NUM, BATCH, rule="topk"), model)
        keep(feed, context)
        data = DataLoader(Examples(), batch_sampler=feed, num_workers=num_workers)
        loader, criterion = StepLoader(data, msg), SampledLoss(feed)
        for batch in loader:
            criterion(model(batch["inputs"]), batch["labels"]).backward()
        learnt.append((feed.state_dict()["batches"], feed.sampler.iteration))
        metrics = MetricRecord({"num-examples": NUM, **loader.metrics})
        return Message(
            RecordDict({"arrays": msg.content["arrays"], "metrics": metrics}), reply_to=msg
        )

    grid = LocalGrid(client, [FAST] * 2)
    FedAvg(fraction_evaluate=0).start(
        grid=grid,
        initial_arrays=ArrayRecord(nn.Linear(6, 2).state_dict()),
        train_config=ConfigRecord({"num-steps": num_steps}),
        num_rounds=3,
    )
    # the very first batch has no gradient to follow
    assert learnt[::2] == learnt[1::2] == [(9, 8), (18, 17), (27, 26)]
    for node in grid.get_node_ids():
        assert grid.context(node).state["flwr-hetero.sampler.scalars"]["batches"] == 27


# --- Lightning and Hugging Face's Trainer ------------------------------------------------


class Examples(Dataset):
    """Examples that know their place."""

    inputs = torch.randn(NUM, 6, generator=torch.manual_seed(0))

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return {"inputs": inputs, "labels": int(inputs[0] > 0), "index": index}


class Watched:
    """A loss that checks what the sampler is told of each batch that a trainer takes."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        sampler = PGDSampler(NUM, BATCH, rule="topk")
        self.feed = PriorityFeed(sampler, self.model, layers="all")
        self.criterion, self.trained, self.told = SampledLoss(self.feed), [], []
        self.update, sampler.update = sampler.update, self.learn

    def learn(self, indices, priorities):
        (batch, expected) = self.trained[-1]
        self.told.append(batch)
        np.testing.assert_array_equal(indices, batch)
        np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-3)
        self.update(indices, priorities)

    def loss(self, batch):
        inputs, labels = batch["inputs"], batch["labels"]
        direction = self.feed.gradient.direction
        losses = lambda outputs, targets: cross_entropy(outputs, targets, reduction="none")  # noqa: E731
        expected = sample_priorities(self.model, losses, inputs, labels, direction)
        self.trained.append((batch["index"].numpy(), expected.numpy()))
        return self.criterion(self.model(inputs), labels)

    def loader(self, num_workers):
        return DataLoader(Examples(), batch_sampler=self.feed, num_workers=num_workers)


def fit_with_lightning(watched, num_workers, accumulation, folder):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = watched.model

        def training_step(self, batch, _):
            return watched.loss(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    lightning.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=accumulation, accelerator="cpu",
        default_root_dir=folder, **quiet,
    ).fit(Module(), watched.loader(num_workers))  # fmt: skip


def fit_with_hugging_face(watched, num_workers, accumulation, folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(watched.loader(num_workers))

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            return watched.loss(inputs)

    settings = transformers.TrainingArguments(
        folder, num_train_epochs=EPOCHS, gradient_accumulation_steps=accumulation, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(watched.model, settings).train()


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fit", [fit_with_lightning, fit_with_hugging_face])
def test_trainers_measure_every_batch(fit, num_workers, accumulation, tmp_path):
    watched = Watched()
    fit(watched, num_workers, accumulation, str(tmp_path))
    assert len(watched.trained) == EPOCHS * NUM // BATCH
    assert len(watched.told) == len(watched.trained) - 1  # the first has no direction to follow
    assert watched.feed.summary()["coverage"] == 1.0
