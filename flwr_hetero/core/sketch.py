r"""A short linear sketch of a long vector: random signs, then a fold.

.. math:: (S v)_c = \sum_{j \equiv c \bmod k} \sigma_j v_j, \qquad \sigma_j = \pm 1

It keeps inner products up to a noise of relative size :math:`1/\sqrt{k}`, and it is linear: the
sketch of a difference is the difference of the sketches.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid

Vectors = NDArray[np.floating]


@lru_cache(maxsize=4)
def random_signs(dim: int, seed: int) -> NDArray[np.int8]:
    """Draw a sign per coordinate, the same on every machine and NumPy version.

    Parameters
    ----------
    dim : int
        Number of coordinates.
    seed : int
        All nodes of a run share it.

    Returns
    -------
    ndarray of int8, shape (dim,)
        +1 or -1; read only, kept for the next call.

    Raises
    ------
    ValueError
        If ``dim`` or ``seed`` is negative.

    Examples
    --------
    >>> random_signs(8, seed=0).tolist() == random_signs(8, seed=0).tolist()
    True
    """
    if dim < 0 or seed < 0:
        raise invalid("dim, seed", (dim, seed), "be at least 0", "check the instruction")
    words = np.random.PCG64(seed).random_raw(-(-dim // 64)).astype("<u8")
    signs = 2 * np.unpackbits(words.view(np.uint8), count=dim).view(np.int8) - 1
    signs.setflags(write=False)
    return signs


def sketch(vectors: Vectors, size: int, seed: int) -> Vectors:
    """Sketch vectors to at most ``size`` coordinates.

    Parameters
    ----------
    vectors : ndarray of float, shape (..., dim)
        For instance gradients.
    size : int
        Coordinates k of the sketch. A vector that is not longer keeps its length, and its inner
        products are exact then.
    seed : int
        Seed of the signs.

    Returns
    -------
    ndarray of float, shape (..., min(size, dim))
        In the type of ``vectors``.

    Raises
    ------
    ValueError
        If ``size`` is not positive.

    Examples
    --------
    >>> v = np.arange(6.0)
    >>> s = sketch(v, 2, seed=3)
    >>> bool(np.allclose(sketch(5 * v, 2, seed=3), 5 * s)), s.shape
    (True, (2,))
    """
    return fold(vectors * random_signs(vectors.shape[-1], seed), size)


def fold(vectors: Vectors, size: int) -> Vectors:
    """Add up the coordinates with the same remainder modulo ``size``.

    Parameters
    ----------
    vectors : ndarray of float, shape (..., dim)
        Folding a sketch gives the shorter sketch of the same vector, if the sizes divide.
    size : int
        Coordinates that remain.

    Returns
    -------
    ndarray of float, shape (..., min(size, dim))
        The sums.

    Raises
    ------
    ValueError
        If ``size`` is not positive.

    Examples
    --------
    >>> fold(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    array([9., 6.])
    """
    if size < 1:
        raise invalid("size", size, "be at least 1", "1024 is usual")
    dim = vectors.shape[-1]
    if dim <= size:
        return vectors
    whole = dim - dim % size
    folded = vectors[..., :whole].reshape(*vectors.shape[:-1], -1, size).sum(axis=-2)
    folded[..., : dim - whole] += vectors[..., whole:]
    return np.asarray(folded)
