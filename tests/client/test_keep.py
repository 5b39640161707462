import numpy as np
from flwr.app import Context, RecordDict

from flwr_hetero.mod import keep
from flwr_hetero.sampler import MercurySampler


def test_a_kept_sampler_goes_on_as_if_it_had_never_stopped():
    context, whole = Context(1, 1, {}, RecordDict(), {}), MercurySampler(20, 5, gate=0)
    for number in range(3):
        kept = MercurySampler(20, 5, gate=0)
        assert keep(kept, context, "mine") == (number > 0)
        for mine, other in zip(kept, whole, strict=True):
            assert mine == other
            for sampler in (kept, whole):
                indices, _ = sampler.take()
                sampler.update(indices, 1.0 + np.sqrt(indices))


def test_nothing_is_kept_of_a_pass_that_does_not_end():
    context = Context(1, 1, {}, RecordDict(), {})
    sampler = MercurySampler(20, 5)
    keep(sampler, context)
    next(iter(sampler))
    assert not keep(MercurySampler(20, 5), context)
