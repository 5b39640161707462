"""Lists of samples and their losses on the wire (shared-data mode of biased local SGD)."""

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from flwr_hetero import keys

Indices = NDArray[np.int64]


def samples_record(indices: Indices, losses: NDArray[np.float32] | None = None) -> ConfigRecord:
    """Pack indices, and losses if there are any, for the wire.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Positions in the shared data set.
    losses : ndarray of float32, shape (n,), optional
        One per index.

    Returns
    -------
    ConfigRecord
        To be stored as ``flwr-hetero.samples``; 4 bytes per index and per loss.

    Examples
    --------
    >>> read_samples(samples_record(np.array([3, 1]), np.array([0.5, 2.0])))
    (array([3, 1]), array([0.5, 2. ], dtype=float32))
    """
    record = ConfigRecord({keys.INDICES: np.asarray(indices, "<i4").tobytes()})
    if losses is not None:
        record[keys.LOSSES] = np.asarray(losses, "<f4").tobytes()
    return record


def read_samples(record: ConfigRecord) -> tuple[Indices, NDArray[np.float32]]:
    """Unpack what :func:`samples_record` packed.

    Parameters
    ----------
    record : ConfigRecord
        From the wire.

    Returns
    -------
    indices : ndarray of int64, shape (n,)
        Positions.
    losses : ndarray of float32, shape (n,) or (0,)
        Empty if there are none.

    Raises
    ------
    ValueError
        If an entry is missing or is not bytes of whole numbers.
    """
    try:
        indices = np.frombuffer(record[keys.INDICES], "<i4")  # type: ignore[arg-type]
        losses = np.frombuffer(record.get(keys.LOSSES, b""), "<f4")  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of samples: {error}") from error
    return indices.astype(np.int64), losses.astype(np.float32)
