"""How many samples are scored while a node waits, and what becomes of the scores."""

import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_hetero import keys
from flwr_hetero.client.timing import note_pace, read_pace
from flwr_hetero.client.weighted_loss import score_batches
from flwr_hetero.mercury import scoring
from flwr_hetero.mercury.sampler import MercurySampler
from flwr_hetero.mod import load_state, save_state

N = 600
DATA = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3


def node(emulated: bool = True, idle_s: float | None = 2.0) -> Context:
    """A node that waits ``idle_s`` a round, and trains on an example in 0.03 s."""
    context = Context(1, 1, {keys.EMULATED: True} if emulated else {}, RecordDict(), {})
    if idle_s is not None:
        note_pace(context, idle_s, 0.03)
    return context


def sampler_and_model() -> tuple[MercurySampler, torch.nn.Module]:
    torch.manual_seed(0)
    return MercurySampler(N, 8, scores="loss"), torch.nn.Linear(4, 3)


@pytest.mark.parametrize(("idle_s", "size"), [(2.0, 150), (0.0, 0), (None, 0), (100.0, N)])
def test_group_is_as_long_as_the_wait(idle_s, size):
    sampler, model = sampler_and_model()
    found = scoring.score_hidden(model, DATA, node(idle_s=idle_s), sampler)
    assert found == size == sampler.coverage * N  # of 180, cut into equal parts
    (indices,) = np.nonzero(sampler.scored_at >= 0)
    losses = score_batches(model, [DATA])[indices]
    np.testing.assert_allclose(sampler.importance[indices], 1 - np.exp(-losses), rtol=1e-5)


def test_real_node_scores_in_the_background(monkeypatch):
    sampler, model = sampler_and_model()
    context = node(emulated=False)
    start = Mock(return_value="folder")
    monkeypatch.setattr(scoring, "start_scoring", start)
    assert scoring.score_hidden(model, DATA, context, sampler) == 0
    group = load_state(context, "scoring")["indices"]
    assert all(map(torch.equal, start.call_args.args[1:], (part[group] for part in DATA)))
    assert start.call_args.kwargs["limit_s"] == 70.0

    monkeypatch.setattr(scoring, "collect_scores", lambda folder: (np.full(5, 9.0), 0.1))
    scoring.collect_hidden(sampler, context)
    assert sampler.coverage == 5 / N
    assert read_pace(context).score_s == pytest.approx((0.01 + 0.1 / 5) / 2)
    monkeypatch.setattr(scoring, "collect_scores", pytest.fail)
    scoring.collect_hidden(sampler, context)  # once only


@pytest.mark.parametrize(
    ("job", "scores", "warns"),
    [
        ({"nonsense": 1}, [1.0], False),
        ({"folder": "gone"}, [1.0], True),
        ({"folder": "gone", "indices": np.arange(2)}, [1.0, np.nan], True),
        ({"folder": "gone", "indices": np.array([10**6])}, [1.0], True),
        ({"folder": "gone", "indices": np.arange(9)}, [], False),
    ],
)
def test_unusable_scores_are_not_used(job, scores, warns, monkeypatch, caplog):
    (sampler, _) = sampler_and_model()
    context = node(emulated=False)
    monkeypatch.setattr(scoring, "collect_scores", lambda folder: (np.array(scores), 0.1))
    save_state(context, "scoring", job)
    with caplog.at_level(logging.WARNING):
        scoring.collect_hidden(sampler, context)
    assert ("scores from the background not used" in caplog.text) == warns
    assert sampler.coverage == 0.0
