"""Score groups of samples while the node waits for the network (BACC, section 4.3)."""

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

JOB = "scoring"  # name of the detached process's job in context.state
SCORE_BATCH = 256
# A detached process ends by itself after LIMIT_S plus LIMIT_IDLE times the usual wait.
LIMIT_S = 60.0
LIMIT_IDLE = 5.0


def score_hidden(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    context: Context,
    sampler: MercurySampler,
    loss_fn: Loss = LOSS,
) -> int:
    """Score the next group while the reply travels and the server aggregates.

    On a real device a detached process scores, and the next round collects the scores with
    :func:`collect_hidden`. On an emulated device they are computed at once and count as hidden.
    Returns how many samples were scored at once.
    """
    pace = read_pace(context)
    if pace is None:
        return 0
    # Section 4.3: as many samples as can be scored while the network is busy.
    size = group_size(pace.idle_s, pace.score_s, sampler.num_samples)
    if not size:
        return 0
    sampler.resize_groups(size)
    group = sampler.refresh_indices()
    inputs, targets = (part[torch.from_numpy(group).to(part.device)] for part in examples)
    if is_emulated(context):
        # The clock of an emulated device hides the time that this takes. A group may be all of the
        # node's data, so it is scored in batches.
        num_batches = -(-len(group) // SCORE_BATCH)
        device = next(model.parameters()).device
        parts = (part.to(device).tensor_split(num_batches) for part in (inputs, targets))
        sampler.update(group, score_batches(model, zip(*parts, strict=True), loss_fn))
        return len(group)
    limit_s = LIMIT_S + LIMIT_IDLE * pace.idle_s
    folder = start_scoring(model, inputs, targets, loss_fn=loss_fn, limit_s=limit_s)
    save_state(context, JOB, {"folder": folder, "indices": group})
    return 0


def collect_hidden(sampler: MercurySampler, context: Context) -> None:
    """End the detached process of the last round and use the scores that it computed."""
    job = load_state(context, JOB) or {}
    folder = str(job.get("folder", ""))
    if not folder:
        return
    save_state(context, JOB, {"folder": "", "indices": np.empty(0, dtype=np.int64)})
    scores, seconds = collect_scores(folder)
    if len(scores):
        note_pace(context, nan, seconds / len(scores) / FORWARD_SHARE)
        # The process may have scored only the first samples of the group.
        scored = np.ravel(job.get("indices", np.empty(0)))[: len(scores)]
        try:
            sampler.update(scored, scores)
        except ValueError as error:
            log(WARNING, "scores from the background not used: %s", error)
