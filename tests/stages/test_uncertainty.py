"""Entropies of answers' meanings, against values known by hand."""

from __future__ import annotations

from math import cos, log, sin

import pytest

pytest.importorskip("scipy")

from bagent.stages.uncertainty import clusters, kernel_entropy, semantic_entropy

A, B = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]


def test_answers_that_mean_the_same_have_no_entropy():
    vectors = [A, [2.0, 0.01, 0.0], [0.5, 0.0, 0.01]]
    assert semantic_entropy(vectors) == 0.0
    assert kernel_entropy([A, A, A]) == pytest.approx(0.0, abs=1e-9)


def test_two_meanings_of_equal_weight_have_the_entropy_of_a_coin():
    assert semantic_entropy([A, B, A, B]) == pytest.approx(log(2))
    assert kernel_entropy([A, B, A, B]) == pytest.approx(log(2))


def test_all_different_answers_have_the_greatest_entropy():
    vectors = [[float(i == j) for j in range(5)] for i in range(5)]
    assert semantic_entropy(vectors) == pytest.approx(log(5))
    assert kernel_entropy(vectors) == pytest.approx(log(5))


def test_unequal_meanings_are_weighed_by_their_share():
    wanted = -(0.75 * log(0.75) + 0.25 * log(0.25))
    assert semantic_entropy([A, A, A, B]) == pytest.approx(wanted)
    assert kernel_entropy([A, A, A, B]) == pytest.approx(wanted)


def test_linkage_is_by_the_mean_similarity():
    # Neighbours are 0.95 alike, the ends 0.8: one is 0.88 alike to the two others in the mean.
    angle = 0.3176
    chain = [[cos(n * angle), sin(n * angle)] for n in range(3)]
    assert clusters(chain, 0.9) in ([0, 0, 1], [0, 1, 1])
    assert clusters(chain, 0.85) == [0, 0, 0]


def test_one_answer_is_certain():
    assert semantic_entropy([A]) == 0.0
    assert kernel_entropy([A]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("vectors", [[], [A, [1.0]], [A, [0.0, 0.0, 0.0]], [[float("nan")] * 3]])
def test_vectors_without_a_direction_are_refused(vectors):
    with pytest.raises(ValueError, match="vector"):
        semantic_entropy(vectors)
