"""Networks nobody here wrote, in training mode, two steps each: the plain bits at every budget, under every policy.

Every policy meets every network at the middle and at the smallest workable limit. With everything held, or nothing, there is
nothing to decide, so there each network runs under one policy, by turns. *Heavy* networks (more than about a second a run)
take turns at every budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from parity import networks
from parity.harness import BUDGETS, Case, check
from torchvision import models

from recals_exp.recals import POLICIES

HEAVY = (
    "googlenet-with-aux",
    "inception-v3-with-aux",
    "faster-rcnn-mobilenet",
    "fcn-resnet",
    "r3d",
    "mnasnet",
    "mobilenet-v3",
)


def by_turns(cases: Iterable[Case]) -> Any:
    found = []
    policies = list(POLICIES)
    for i, case in enumerate(cases):
        for j, budget in enumerate(BUDGETS):
            one = budget in ("full", "nothing") or case.name in HEAVY
            chosen = [policies[(i + j) % len(policies)]] if one else policies
            found += [pytest.param(case, policy, budget, id=f"{case.name}-{policy}-{budget}") for policy in chosen]
    return pytest.mark.parametrize(("case", "policy", "budget"), found)


@by_turns(networks.CLASSIFIERS)
def test_torchvision_classifier(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@by_turns(networks.PIXELS_BOXES_CLIPS)
def test_torchvision_segmentation_detection_video(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@by_turns(networks.RECURRENT)
def test_recurrent(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@networks.NEEDS_TRANSFORMERS
@by_turns(networks.TRANSFORMERS)
def test_transformers(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


@networks.NEEDS_SPIKINGJELLY
@by_turns(networks.SPIKING)
def test_spikingjelly(case: Case, policy: str, budget: str) -> None:
    check(case, policy, budget)


def test_every_classification_family_of_torchvision_is_here() -> None:
    families = {models.get_model_builder(name).__module__ for name in models.list_models(module=models)}
    assert {type(case.build().fn).__module__ for case in networks.CLASSIFIERS} == families
