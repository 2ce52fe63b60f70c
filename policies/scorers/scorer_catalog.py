"""Every scorer by the name that a route gives it."""

from __future__ import annotations

from collections.abc import Mapping

from policies.routes.route import ScorerName
from policies.scorers.baselines import argmin_ttft, least_request, lmetric, prefix_hash, round_robin, token_load
from policies.scorers.predicted import predicted
from policies.scorers.scorer import Scorer

SCORERS: Mapping[ScorerName, Scorer] = {
    "predicted": predicted,
    "round_robin": round_robin,
    "least_request": least_request,
    "prefix_hash": prefix_hash,
    "lmetric": lmetric,
    "token_load": token_load,
    "argmin_ttft": argmin_ttft,
}
