"""Importance beyond what training shows: groups scored while the node waits (BACC, section 4.3)."""

from logging import WARNING
from math import nan

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn

from flwr_hetero._flwr import log
from flwr_hetero.client.device import FORWARD_SHARE
from flwr_hetero.client.emulation import is_emulated
from flwr_hetero.client.samplers import load_state, save_state
from flwr_hetero.client.timing import note_pace, read_pace
from flwr_hetero.client.weighted_loss import LOSS, Loss, score_batches
from flwr_hetero.mercury.algorithm import group_size
from flwr_hetero.mercury.background import collect_scores, start_scoring
from flwr_hetero.mercury.sampler import MercurySampler

JOB = "scoring"
"""Name in ``context.state`` of what a detached process is doing."""
SCORE_BATCH = 256
LIMIT_S, LIMIT_IDLE = 60.0, 5.0
"""When a detached worker ends by itself: seconds, and multiples of the usual wait."""


def score_hidden(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    context: Context,
    sampler: MercurySampler,
    loss_fn: Loss = LOSS,
) -> int:
    """Score the next group while the reply travels and the server aggregates.

    On a real device a detached process does it, and the next round collects the scores with
    :func:`collect_hidden`; on an emulated one it is done at once and counts as hidden.
    """
    # section 4.3: as many samples as the network hides
    pace = read_pace(context)
    size = 0 if pace is None else group_size(pace.idle_s, pace.score_s, sampler.num_samples)
    if pace is None or not size:
        return 0
    sampler.resize_groups(size)
    group = sampler.refresh_indices()
    inputs, targets = (part[torch.from_numpy(group).to(part.device)] for part in examples)
    # emulated devices hide it on their own clock
    if is_emulated(context):
        # batch by batch: a group may be all of the node's data
        device, count = next(model.parameters()).device, -(-len(group) // SCORE_BATCH)
        parts = (part.to(device).tensor_split(count) for part in (inputs, targets))
        sampler.update(group, score_batches(model, zip(*parts, strict=True), loss_fn))
        return len(group)
    limit_s = LIMIT_S + LIMIT_IDLE * pace.idle_s
    folder = start_scoring(model, inputs, targets, loss_fn=loss_fn, limit_s=limit_s)
    save_state(context, JOB, {"folder": folder, "indices": group})
    return 0


def collect_hidden(sampler: MercurySampler, context: Context) -> None:
    """End the detached process of the last round and take what it got done."""
    job = load_state(context, JOB) or {}
    folder, indices = str(job.get("folder", "")), job.get("indices", np.empty(0))
    if not folder:
        return
    save_state(context, JOB, {"folder": "", "indices": np.empty(0, dtype=np.int64)})
    # of the first samples, as far as it got
    scores, seconds = collect_scores(folder)
    if len(scores):
        note_pace(context, nan, seconds / len(scores) / FORWARD_SHARE)
        try:
            sampler.update(np.ravel(indices)[: len(scores)], scores)
        except ValueError as error:
            log(WARNING, "scores from the background not used: %s", error)
