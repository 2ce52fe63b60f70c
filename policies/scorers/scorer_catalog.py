"""Every scorer by the name that a route gives it."""

from __future__ import annotations

from collections.abc import Mapping

from policies.routes.route import ScorerName
from policies.scorers import argmin_ttft, least_request, lmetric, predicted, prefix_hash, round_robin, token_load
from policies.scorers.scorer import Scorer

SCORERS: Mapping[ScorerName, Scorer] = {
    "predicted": predicted.score,
    "round_robin": round_robin.score,
    "least_request": least_request.score,
    "prefix_hash": prefix_hash.score,
    "lmetric": lmetric.score,
    "token_load": token_load.score,
    "argmin_ttft": argmin_ttft.score,
}
