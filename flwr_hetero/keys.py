"""Every name that flwr-hetero puts on the wire, with its unit.

What a wrapper adds to an instruction or a mod adds to a reply is a ``ConfigRecord`` of its own.
Flower's strategies look at the one ``ArrayRecord`` and the one ``MetricRecord`` of a reply and pass
over these, so nodes with and without mods of this package can be mixed under any strategy.
"""

PREFIX = "flwr-hetero."
"""Of every record below, so that none is taken for an app's own; entries of records have none."""
PROFILE_MESSAGE = "train.profile"
"""Ask a node to do its usual local training and report the time only (TiFL)."""

# --- records in a reply ------------------------------------------------------------
TIMING = PREFIX + "timing"
"""ConfigRecord written by :mod:`flwr_hetero.mod`: how long the node took."""
TRAIN_TIME = "train-time"
"""Seconds of ClientApp work, monotonic clock or emulated; in TIMING or the metrics."""
TRANSFER_TIME = "transfer-time"
"""Seconds that the link needed for both ways; emulated devices only, else 0.

In Flower's simulation with all else that a message costs, for nobody sees its round trip there."""
START_TIME = "start-time"
"""Seconds from the start of the message's process to the call of its ClientApp; if known."""
RECEIVE_TIME = "receive-time"
"""Seconds for which the SuperNode pulled the message; if it measures them."""
SEND_TIME = "send-time"
"""Seconds for which it pushed its last reply to a message of this kind; if it measures them."""
WORKER = "worker"
"""Host and process in which the ClientApp ran, which nodes share; in Flower's simulation only."""
HANDOVER_TIME = "handover-time"
"""Seconds for which that process was idle before the message, although it was there."""
EMULATED = "emulated"
"""True when the times come from a device profile and not from a clock."""
PARTITION_ID = "partition-id"
"""The node's data partition, for a stable identity (Flower's own key in node_config)."""

# --- keys in the MetricRecord of a reply -------------------------------------------
NUM_EXAMPLES = "num-examples"
"""Size of the node's local data set (Flower's own default weight)."""
NUM_STEPS = "num-steps"
"""Optimisation steps the node took this round."""
EXAMPLES_PROCESSED = "examples-processed"
"""Examples that went forward and backward this round (default: num-examples)."""
EXAMPLES_SCORED = "examples-scored"
"""Examples that only went forward, to be scored by a sampler (default: 0)."""
LOSS_RMS = "loss-rms"
"""Root of the mean of the squared losses of the examples processed (Oort)."""

PROTOCOL = frozenset({NUM_STEPS, EXAMPLES_PROCESSED, EXAMPLES_SCORED, LOSS_RMS})
"""Metrics that some nodes of a fleet may report and others not."""

# --- keys in the ConfigRecord of an instruction ------------------------------------
SERVER_ROUND = "server-round"
"""Flower's own: the current round, from 1."""
KEEP_OPTIMIZER = "keep-optimizer"
"""True: the node's torch optimizers go on with the state that they had after the last message."""
REPEAT = "repeat"
"""How often the node was asked to train in this round before; absent in rounds, where it is 0."""
PROFILE_ROUND = "profile-round"
"""Number of a profiling round; the warm-up rounds come first."""
FAST = "fast"
"""True for a node of the fast class, which samples by loss (biased local SGD)."""
FAST_SHARE = "fast-share"
"""Size of a fast node's allocation as a part of its samples, in (0, 1]."""
HIGH_LOSS_FRACTION = "high-loss-fraction"
"""Lambda in (0, 1]: part of that allocation that goes by loss."""

# --- shared-data mode of biased local SGD: a ConfigRecord each way ------------------
SAMPLES = PREFIX + "samples"
"""In an instruction: INDICES to train on. In a reply: INDICES processed and their LOSSES."""
INDICES = "indices"
"""Positions in the shared data set: bytes of little-endian int32."""
LOSSES = "losses"
"""Loss per index: bytes of little-endian float32."""

# --- Mercury: what a node knows of its own pace (in its state), and scoring while idle ----
PACE = PREFIX + "pace"
"""ConfigRecord in the node's state, written by :mod:`flwr_hetero.mod`."""
IDLE_TIME = "idle-time"
"""Seconds per round that the node waits for the network, smoothed."""
EXAMPLE_TIME = "example-time"
"""Seconds per example, forward and backward, smoothed."""
REPLIED_AT = "replied-at"
"""Reading of the node's monotonic clock at its last training reply."""
EXAMPLES_HIDDEN = PREFIX + "examples-hidden"
"""Metric: examples scored after training, while the update is on the network."""

# --- resharding: a ConfigRecord each way, lists as INDICES; RAW SAMPLES ARE IN IT ----------
RESHARDING = PREFIX + "resharding"
"""In an instruction: SHARE .. RECEIVED and what the node holds. In a reply: what it offers."""
SHARE = "share"
"""Part of its samples that a node offers, in (0, 1]."""
BY_IMPORTANCE = "by-importance"
"""Whether important samples are offered first; else any."""
BUDGET = "budget-bytes"
"""Bytes of samples that a reply may carry."""
RECEIVED = "received"
"""Offers that the server has taken from the node."""
SLOTS = "slots"
"""Slots with another node's sample, in a reply those offered: bytes of little-endian int32."""
VERSIONS = "versions"
"""Number of the sample in each of SLOTS; another one means other content."""
SENT = "sent"
"""Those of SLOTS whose samples are in CONTENT."""
MISSING = "missing"
"""In a reply: slots whose samples the node lacks."""
NUM_SAMPLES = "samples"
"""In a reply: number of samples that the node has; what it says first counts."""
CONTENT = "content"
"""Samples, one after the other: float32 inputs, then the label as int64."""

# --- CD-GraB: a ConfigRecord each way ------------------------------------------------------
ORDER = PREFIX + "order"
"""In an instruction: VERSION .. SKETCH_SEED. In a reply: the same and FIRST_PAIR .. SCALE."""
VERSION = "version"
"""Version of a node's order, from 0; in an instruction the one wanted, in a reply the one held."""
NUM_UNITS = "num-units"
"""Units in an order; in an instruction 0 if that is the node's own choice."""
WHOLE_ORDER = "order"
"""A node's order: bytes of little-endian int32."""
SKETCH_SIZE = "sketch-size"
"""Numbers per vector; 0 for whole gradients. In a reply the length of the vectors."""
SKETCH_SEED = "sketch-seed"
"""Seed of the sketch's signs."""
FIRST_PAIR = "first-pair"
"""Position in the order of the first pair in VECTORS."""
VECTORS = "vectors"
"""Differences of pairs, one after the other: sketches in float16, whole ones in float32."""
SCALE = "scale"
"""What to multiply VECTORS by."""

# --- what a node's sampler does: a ConfigRecord in a reply ------------------------------------
SAMPLER = PREFIX + "sampler"
"""Numbers by name, for the history; never used for training."""

# --- what a node did for a message: a ConfigRecord in a reply to training ---------------------
WORK = PREFIX + "work"
"""Written by the mods of :mod:`flwr_hetero.mod`: NUM_STEPS, EXAMPLES_PROCESSED and these."""
PASSES = "passes"
"""How often the app iterated its loader: its local epochs, at least 1."""
JOB_STEPS = "job-steps"
"""Steps that the app would have taken unasked: passes times batches of a full pass."""
STEP_TIME = "step-time"
"""Seconds a step by the node's clock, the first left out where there are more; or emulated."""
STEP_BATCHES = "step-batches"
"""Batches of one step of the app's optimizers, as with gradient accumulation; absent if 1."""
DATA_SIZE = "data-size"
"""Examples of the data that the loader passes over, 0 if unknown; absent without a loader."""
CARRIED = PREFIX + "carried"
"""ConfigRecord in the node's state: states of optimizers and the like, as torch saves them."""
PASS = PREFIX + "pass"
"""ConfigRecord in the node's state: where it is in its passes over the data, and PASSES."""

# --- between the processes of a node ----------------------------------------------------------
TIMES_FILE = "FLWR_HETERO_TIMES"
"""Environment variable: the file in which a SuperNode tells a message's process of its times."""
RECEIVED_AT = "received-at"
"""In that file, beside RECEIVE_TIME and SEND_TIME: when the message was there, monotonic clock."""

# --- compression: a ConfigRecord each way, and packed arrays in place of the model's ------------
COMPRESSION = PREFIX + "compression"
"""In an instruction: BITS_UP and FEEDBACK. In a reply: BITS_UP, whatever is packed."""
BITS_UP = "bits-up"
"""Bits of a value in the reply's model, which is then an update; 0: as the app returns it."""
FEEDBACK = "feedback"
"""True: the node adds to an update what the one before has lost on its way."""
RESIDUAL = PREFIX + "residual"
"""ArrayRecord in the node's state: what its last update has lost, by array."""
PACKED = PREFIX + "packed-"
"""Serialisation of a packed array, before its bits; its type and shape are those of the model's."""

RECORDS = frozenset(
    {TIMING, SAMPLES, PACE, RESHARDING, ORDER, SAMPLER, WORK, CARRIED, PASS}
    | {COMPRESSION, RESIDUAL}
)
"""All names above that stand for records; the others are entries, metrics or Flower's own."""
