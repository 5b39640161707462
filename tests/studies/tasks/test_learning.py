"""Every task is learnt by each sampler."""

from flwr_hetero.client.weighted_loss import scoring
from flwr_hetero_studies.tasks import make_model


def test_scoring_leaves_an_lstm_differentiable_by_cudnn():
    """In eval mode cuDNN has no backward pass; without dropout the mode says nothing else."""
    model = make_model("lstm-lm", (12,), (12, 128)).eval()
    with scoring(model):
        assert [name for name, module in model.named_modules() if module.training] == ["lstm"]
        model.lstm.dropout = 0.5
    with scoring(model.train()):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
