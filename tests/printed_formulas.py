"""Measures as the papers print them, sample by sample."""

import math

import numpy as np


def cosine(a, b):
    """Of two lists of numbers."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def covariances(phi, y):
    """(Sigma_W, Sigma_B, Sigma_T) as sums of outer products over the samples."""
    phi, y = phi.numpy(), y.numpy()
    n, d = phi.shape
    mean = sum(phi) / n
    sigma_w, sigma_b, sigma_t = (np.zeros((d, d)) for _ in range(3))
    for i in range(n):
        own = [phi[j] for j in range(n) if y[j] == y[i]]
        class_mean = sum(own) / len(own)
        sigma_w += np.outer(phi[i] - class_mean, phi[i] - class_mean) / n
        sigma_b += np.outer(class_mean - mean, class_mean - mean) / n
        sigma_t += np.outer(phi[i] - mean, phi[i] - mean) / n
    return sigma_w, sigma_b, sigma_t


def cka_as_printed(x, y):
    """FedCKA eq. (3): every squared Frobenius norm as a sum over its entries."""
    x, y = x - x.mean(0), y - y.mean(0)

    def squared_norm(a, b):  # ||b' a||_F^2
        columns = [(a[:, i], b[:, j]) for i in range(a.shape[1]) for j in range(b.shape[1])]
        return sum(float(u @ v) ** 2 for u, v in columns)

    return squared_norm(x, y) / math.sqrt(squared_norm(x, x) * squared_norm(y, y))
