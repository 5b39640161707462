"""CD-GraB in plain loops, apart from the package: orders, signs, sketches."""

from math import fsum

import numpy as np


class TwoPointers:
    """Algorithms 1, 2 and 4 in plain Python, by two pointers per node."""

    def __init__(self, vectors, orders):
        self.vectors = [[[float(x) for x in unit] for unit in node] for node in vectors]
        self.orders = [list(map(int, order)) for order in orders]

    def epoch(self):
        nodes = range(len(self.orders))
        units = len(self.orders[0])
        total = [0.0] * len(self.vectors[0][0])
        slots = [[None] * units for _ in nodes]
        for left in range(units // 2):
            for i in nodes:
                first, second = self.orders[i][2 * left : 2 * left + 2]
                pair = zip(self.vectors[i][first], self.vectors[i][second], strict=True)
                diff = [a - b for a, b in pair]
                plus = fsum(r * z for r, z in zip(total, diff, strict=True)) <= 0
                total = [r + z if plus else r - z for r, z in zip(total, diff, strict=True)]
                both = (first, second) if plus else (second, first)
                slots[i][left], slots[i][units - 1 - left] = both
        for i in nodes:
            if units % 2:
                slots[i][units // 2] = self.orders[i][-1]
        self.orders = slots
        return slots


def parallel_sgd(gradients, num_units, num_params, epochs, lr, dtype):
    """Algorithms 3 and 4: one shared w; ``gradients[i](unit, w)``. Returns w and all orders."""
    w = np.zeros(num_params, dtype)
    orders = []
    n = num_units
    order = [list(range(n)) for _ in gradients]
    for _ in range(epochs):
        orders.append([list(o) for o in order])
        total = np.zeros(num_params, dtype)
        slots = [[None] * n for _ in gradients]
        before = []
        for j in range(n):
            now = [g(order[i][j], w).astype(dtype) for i, g in enumerate(gradients)]
            if j % 2:
                for i, own in enumerate(now):
                    z = before[i] - own
                    plus = np.dot(total, z) <= 0
                    total = total + z if plus else total - z
                    pair = (order[i][j - 1], order[i][j])
                    slots[i][j // 2], slots[i][n - 1 - j // 2] = pair if plus else pair[::-1]
            before = now
            w = w - dtype(lr) * np.mean(now, axis=0).astype(dtype)
        for i, visited in enumerate(order):
            order[i] = [visited[-1] if unit is None else unit for unit in slots[i]]
    return w, orders


def sketch(vectors, size, signs):
    """Multiply by signs and add up the coordinates with the same remainder modulo ``size``."""
    short = np.zeros((len(vectors), min(size, vectors.shape[1])))
    for row, vector in zip(short, vectors, strict=True):
        for j, value in enumerate(vector):
            row[j % size] += signs[j] * value
    return short
