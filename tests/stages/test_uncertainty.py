"""Entropies of answers' meanings, against values known by hand."""

from __future__ import annotations

from math import cos, log, sin

import pytest

pytest.importorskip("scipy")

from bagent.stages.uncertainty import clusters, kernel_entropy, semantic_entropy

A, B = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]


IDENTITY = [[float(i == j) for j in range(5)] for i in range(5)]


@pytest.mark.parametrize(
    ("vectors", "entropy"),
    [
        ([A], 0.0),
        ([A, A, A], 0.0),
        ([A, B, A, B], log(2)),
        (IDENTITY, log(5)),
        ([A, A, A, B], -(0.75 * log(0.75) + 0.25 * log(0.25))),
    ],
    ids=["one answer", "one meaning", "two of equal weight", "all different", "unequal shares"],
)
def test_the_entropy_is_that_of_the_shares_of_meanings(vectors, entropy):
    assert semantic_entropy(vectors) == pytest.approx(entropy)
    assert kernel_entropy(vectors) == pytest.approx(entropy, abs=1e-9)


def test_answers_that_are_nearly_alike_mean_the_same():
    assert semantic_entropy([A, [2.0, 0.01, 0.0], [0.5, 0.0, 0.01]]) == 0.0


def test_linkage_is_by_the_mean_similarity():
    # Neighbours are 0.95 alike, the ends 0.8: one is 0.88 alike to the two others in the mean.
    angle = 0.3176
    chain = [[cos(n * angle), sin(n * angle)] for n in range(3)]
    assert clusters(chain, 0.9) in ([0, 0, 1], [0, 1, 1])
    assert clusters(chain, 0.85) == [0, 0, 0]


@pytest.mark.parametrize("vectors", [[], [A, [1.0]], [A, [0.0, 0.0, 0.0]], [[float("nan")] * 3]])
def test_vectors_without_a_direction_are_refused(vectors):
    with pytest.raises(ValueError, match="vector"):
        semantic_entropy(vectors)
