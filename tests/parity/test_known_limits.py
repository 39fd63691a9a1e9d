"""The list of limits can neither grow nor go stale unseen."""

from __future__ import annotations

import pytest
from parity.databases import ORDER, Verdict
from parity.known_limits import MODULES, OPS, Limit, expected

LIMITS = {"a": Limit(("pinned",), "a reason"), "full only": Limit(("node",), "a reason", short=False)}


def verdict(name: str, kind: str) -> Verdict:
    return Verdict(name, kind, samples=1, details=["what differs"])


@pytest.mark.parametrize("kind", ["exact", "saves nothing"])
def test_what_is_exact_passes(kind: str) -> None:
    expected(verdict("b", kind), LIMITS, full=False)


@pytest.mark.parametrize("kind", [kind for kind in ORDER if kind not in ("exact", "saves nothing")])
def test_what_is_not_listed_fails(kind: str) -> None:
    with pytest.raises(AssertionError, match=f"b is {kind}:\nwhat differs"):
        expected(verdict("b", kind), LIMITS, full=False)


def test_what_is_listed_passes_and_only_as_listed() -> None:
    expected(verdict("a", "pinned"), LIMITS, full=False)
    with pytest.raises(AssertionError, match="says that a is pinned; it is wrong:\nwhat differs"):
        expected(verdict("a", "wrong"), LIMITS, full=False)


def test_an_entry_that_is_exact_by_now_fails() -> None:
    with pytest.raises(AssertionError, match="says that a is pinned; it is exact: take the entry away"):
        expected(verdict("a", "exact"), LIMITS, full=False)


def test_an_entry_for_the_full_run_counts_there_alone() -> None:
    expected(verdict("full only", "exact"), LIMITS, full=False)
    expected(verdict("full only", "node"), LIMITS, full=True)
    with pytest.raises(AssertionError, match="full only is node"):
        expected(verdict("full only", "node"), LIMITS, full=False)
    with pytest.raises(AssertionError, match="take the entry away"):
        expected(verdict("full only", "exact"), LIMITS, full=True)


def test_no_samples_is_no_pass() -> None:
    with pytest.raises(AssertionError, match="b: no samples"):
        expected(Verdict("b", "exact"), LIMITS, full=False)


def test_every_entry_is_a_known_verdict_with_a_reason() -> None:
    for limit in (*OPS.values(), *MODULES.values()):
        assert set(limit.kinds) <= {"node", "pinned", "refused", "warnings"}
        assert len(limit.reason) > 20
