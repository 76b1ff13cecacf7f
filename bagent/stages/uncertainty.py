"""Measures of how much the answers to one question differ in meaning, from their embeddings.

Both measures are in nats and 0 where all answers mean the same. They need ``numpy`` and
``scipy``: ``pip install 'numpy>=2,<3' 'scipy>=1.15,<2'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bagent.errors import MissingPackage

if TYPE_CHECKING:
    import numpy

Vectors = Sequence[Sequence[float]]
"""One vector for each answer, all of one length."""

SIMILARITY = 0.9
"""Answers whose mean cosine similarity is at least this mean the same."""


def clusters(vectors: Vectors, similarity: float = SIMILARITY) -> list[int]:
    """Return the number of the cluster of each vector, from 0 in order of first appearance.

    Average-linkage clustering (UPGMA; Sokal and Michener, Univ. Kansas Sci. Bull. 38, 1958) of
    the cosine distance: two clusters are joined while the mean cosine similarity between their
    members is at least ``similarity``.

    Raises:
        ValueError: no vector, a zero vector, or vectors of different lengths.
        MissingPackage: numpy or scipy is not installed.
    """
    unit = _unit(vectors)
    if len(unit) == 1:
        return [0]
    try:
        from scipy.cluster.hierarchy import average, fcluster
        from scipy.spatial.distance import pdist
    except ImportError:
        raise _missing() from None
    distances = pdist(unit, "cosine").clip(min=0.0)
    labels = fcluster(average(distances), 1.0 - similarity + 1e-12, "distance")
    numbers: dict[int, int] = {}
    return [numbers.setdefault(int(label), len(numbers)) for label in labels]


def semantic_entropy(vectors: Vectors, similarity: float = SIMILARITY) -> float:
    """Return the entropy of the answers' meanings in nats: ``-sum p ln p`` over :func:`clusters`.

    ``p`` is the share of the answers in a cluster. This is the discrete semantic entropy of
    Farquhar, Kossen, Kuhn and Gal, Nature 630, 625 (2024), with clusters of embeddings in the
    place of entailment. It lies between 0 and ``ln N`` for N answers.

    Raises:
        ValueError, MissingPackage: as :func:`clusters`.
    """
    from math import log

    labels = clusters(vectors, similarity)
    shares = [labels.count(label) / len(labels) for label in sorted(set(labels))]
    return max(0.0, -sum(share * log(share) for share in shares))


def kernel_entropy(vectors: Vectors) -> float:
    """Return the von Neumann entropy ``-tr(K ln K)`` of the answers' similarity, in nats.

    ``K`` is the matrix of cosine similarities divided by N, so its trace is 1: the kernel language
    entropy of Nikitin, Kossen, Gal and Marttinen, NeurIPS 2024 (arXiv:2405.20003), with the
    Gram matrix of embeddings as the kernel. It lies between 0 and ``ln N`` for N answers, and
    needs no threshold.

    Raises:
        ValueError, MissingPackage: as :func:`clusters`.
    """
    import numpy as np

    unit = _unit(vectors)
    values = np.linalg.eigvalsh(unit @ unit.T / len(unit))
    positive = values[values > 1e-12]
    return max(0.0, float(-(positive * np.log(positive)).sum()))


def _unit(vectors: Vectors) -> numpy.ndarray[Any, Any]:
    """Return the vectors as rows of length 1."""
    try:
        import numpy as np
    except ImportError:
        raise _missing() from None
    if not len(vectors):
        raise ValueError("no vectors: nothing was answered")
    if len({len(vector) for vector in vectors}) > 1:
        raise ValueError("the vectors differ in length: they are not of one model")
    rows = np.asarray(vectors, dtype=float)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(rows).all() or not norms.all():
        raise ValueError("a vector is zero or not finite: it has no direction")
    unit: numpy.ndarray[Any, Any] = rows / norms
    return unit


def _missing() -> MissingPackage:
    return MissingPackage(
        "embeddings are compared with numpy and scipy",
        hint="pip install 'numpy>=2,<3' 'scipy>=1.15,<2'",
    )
