"""Every task is learnt by each sampler."""

import pytest
import torch

from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero.client.weighted_loss import scoring
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
)
from flwr_hetero_studies.tasks import (
    evaluate,
    load_partition,
    make_model,
    train,
)

KINDS = {
    "lstm-lm": ("stdlib", "language-model", {"lr": 0.01, "optimizer": "adam"}),
    "textcnn": ("stdlib", "classification", {"lr": 0.5}),
}
"""Model to data set, task and how it is trained."""
NUM, BATCH = 64, 8


SAMPLERS = {
    "uniform": lambda model: UniformSampler(NUM, BATCH, seed=0),
    "mercury": lambda model: MercurySampler(NUM, BATCH, seed=0, scores="loss"),
    "top-loss": lambda model: TopLossSampler(NUM, BATCH, seed=0, fast=False),
    "id-grab": lambda model: OrderedSampler(NUM, BATCH, seed=0, method="id-grab"),
    "pgd": lambda model: PriorityFeed(PGDSampler(NUM, BATCH, seed=0, rule="topk"), model),
}


def watch(sampler: BatchSampler):
    def on_batch(model, indices, losses):
        assert losses.shape == indices.shape
        if isinstance(sampler, OrderedSampler):
            sampler.observe(batch_gradient(model))
        return sampler.on_batch(model, indices, losses) if isinstance(sampler, PriorityFeed) else 0

    return on_batch


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_trains_every_task(caplog, sampler, name):
    dataset, task, how = KINDS[name]
    examples = load_partition(dataset, 0, len(load_partition(dataset, 0, 1, task=task)) // NUM,
                              task=task, partition="iid")  # fmt: skip
    model = make_model(name, tuple(examples.inputs.shape[1:]), outputs_of(examples))
    drawing = SAMPLERS[sampler](model)
    before, _ = evaluate(model, examples)
    train(model, examples, drawing, num_steps=3 * len(drawing), on_batch=watch(drawing), **how)
    assert evaluate(model, examples)[0] < 0.9 * before
    assert not caplog.records  # PGD's priorities need no other way


def outputs_of(examples):
    return examples.task.outputs(examples.targets.numpy(), 10)


def test_scoring_leaves_an_lstm_differentiable_by_cudnn():
    """In eval mode cuDNN has no backward pass; without dropout the mode says nothing else."""
    model = make_model("lstm-lm", (12,), (12, 128)).eval()
    with scoring(model):
        assert [name for name, module in model.named_modules() if module.training] == ["lstm"]
        model.lstm.dropout = 0.5
    with scoring(model.train()):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["lstm-lm", "gpt"])
def test_language_model_sees_no_later_character(name):
    model = make_model(name, (12,), (12, 128), seed=1)
    inputs = torch.randint(2, 128, (3, 12), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[:, 7:] = 1
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not before[:, 7:].allclose(after[:, 7:])
