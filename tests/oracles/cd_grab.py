"""CD-GraB in plain loops, apart from the package: orders, signs, sketches."""

from math import fsum

import numpy as np


class TwoPointers:
    """Algorithms 1, 2 and 4 in plain Python, by two pointers per node; mistakes on request."""

    def __init__(self, vectors, orders, mistake=""):
        self.vectors = [[[float(x) for x in unit] for unit in node] for node in vectors]
        self.orders, self.mistake = [list(map(int, order)) for order in orders], mistake
        self.total = [0.0] * vectors.shape[2]

    def epoch(self):
        nodes, units = range(len(self.orders)), len(self.orders[0])
        if self.mistake != "sum kept over epochs":
            self.total = [0.0] * len(self.total)
        slots = [[None] * units for _ in nodes]
        left, right = [0] * len(slots), [units - 1] * len(slots)
        steps = [(p, i) for p in range(0, units - 1, 2) for i in nodes]
        if self.mistake == "node by node":
            steps.sort(key=lambda step: step[1])
        for p, i in steps:
            first, second = self.orders[i][p], self.orders[i][p + 1]
            if self.sign(self.vectors[i][first], self.vectors[i][second]) < 0:
                first, second = second, first
            slots[i][left[i]], slots[i][right[i]] = first, second
            left[i], right[i] = left[i] + 1, right[i] - 1
        for i in nodes:
            if units % 2:
                slots[i][left[i]] = self.orders[i][-1]
            if self.mistake == "back half not reversed":
                slots[i][right[i] + 1 :] = slots[i][: right[i] : -1]
            if self.mistake == "signs on the identity":
                place = {unit: position for position, unit in enumerate(self.orders[i])}
                slots[i] = [place[unit] for unit in slots[i]]
        self.orders = slots
        return slots

    def sign(self, first, second):
        if self.mistake == "aliased":  # the second gradient has overwritten the first
            first = second
        diff = [a - b for a, b in zip(first, second, strict=True)]
        product = fsum(r * z for r, z in zip(self.total, diff, strict=True))
        plus = product < 0 if self.mistake == "tie is minus" else product <= 0
        if self.mistake == "rule inverted":
            plus = product >= 0
        sign = 1 if plus else -1
        self.total = [r + sign * z for r, z in zip(self.total, diff, strict=True)]
        return sign


MISTAKES = (
    "back half not reversed",
    "sum kept over epochs",
    "node by node",
    "signs on the identity",
    "aliased",
    "rule inverted",
    "tie is minus",
)


def parallel_sgd(gradients, num_units, num_params, epochs, lr, dtype):
    """Algorithms 3 and 4: one shared w; ``gradients[i](unit, w)``. Returns w and all orders."""
    w, orders, n = np.zeros(num_params, dtype), [], num_units
    order = [list(range(n)) for _ in gradients]
    for _ in range(epochs):
        orders.append([list(o) for o in order])
        total, slots = np.zeros(num_params, dtype), [[None] * n for _ in gradients]
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


def self_balancing_walk(running_sum, pair_diffs, rng, *, c=30.0):
    """Draw signs with P(+1) = 1/2 - <r, z> / 2c, clipped: the rule that the theory is about."""
    total = np.array(running_sum, np.result_type(running_sum, pair_diffs, np.float32))
    signs = np.ones(len(pair_diffs), np.int8)
    for row, (diff, draw) in enumerate(zip(pair_diffs, rng.random(len(signs)), strict=True)):
        signs[row] = 1 if draw < 0.5 - (total @ diff) / (2 * c) else -1
        total += signs[row] * diff
    return total, signs


def sketch(vectors, size, signs):
    """Multiply by signs and add up the coordinates with the same remainder modulo ``size``."""
    short = np.zeros((len(vectors), min(size, vectors.shape[1])))
    for row, vector in zip(short, vectors, strict=True):
        for j, value in enumerate(vector):
            row[j % size] += signs[j] * value
    return short
