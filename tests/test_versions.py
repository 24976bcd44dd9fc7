"""The releases of Lightning that are allowed work; of everything there is a lowest one."""

import pytest
from packaging.requirements import Requirement

from lightning_versions import allowed, run
from lowest_versions import lowest


def test_both_ends_of_what_is_allowed_are_asked_for():
    releases = allowed()
    lowest, newest = Requirement(releases["lowest"]), Requirement(releases["newest"])
    [bound] = lowest.specifier
    assert bound.operator == "=="
    assert newest.specifier.contains(bound.version)
    assert any(limit.operator == "<" for limit in newest.specifier)


@pytest.mark.slow
@pytest.mark.long
def test_the_lowest_release():
    """The newest is what a fresh environment has."""
    assert run(allowed()["lowest"])


def test_of_everything_a_lowest_release_is_asked_for():
    releases = [Requirement(release) for release in lowest()]
    assert {"torch", "torchvision", "lightning", "jsonargparse", "altair", "pytest"} <= {r.name for r in releases}
    assert all([bound.operator for bound in release.specifier] == ["=="] for release in releases)
