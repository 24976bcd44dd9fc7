"""Whether a printed ordering of two rows holds, for each model state that a test score can be of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

#: a difference is one beyond chance below this two-sided p; there is no correction for the number of orderings
LEVEL = 0.05
#: a test over fewer seeds says nothing
SEEDS = 3

Outcome = Literal["holds", "reversed", "level", "undecided", "too few seeds", "not measured"]


@dataclass(frozen=True)
class Reading:
    """A model state that scores may be of.

    Args:
        name: the state in words.
        evaluate: the values of ``federation.evaluate`` with which a run's plain scores are of this state.
        state: how scores are named that a run has beside its plain ones: ``test/{state}/acc``.
    """

    name: str
    evaluate: frozenset[str]
    state: str


AS_TRAINED = Reading("as trained", frozenset({"before"}), "trained")
AS_AGGREGATED = Reading("as aggregated", frozenset({"after"}), "aggregated")
READINGS = (AS_TRAINED, AS_AGGREGATED)


def path_of(reading: Reading, result: Mapping[str, Any], evaluate: str) -> str | None:
    """Return what scores of this reading have in their names in a result, ``aggregated/`` or nothing; None without any.

    Args:
        reading: the reading.
        result: a line of ``PAPER.jsonl``.
        evaluate: ``federation.evaluate`` of its run.
    """
    # A run in which nothing travels has one state only: what is trained is what the next round starts from.
    if evaluate in reading.evaluate or result["elements"] == 0:
        return ""
    return f"{reading.state}/" if f"test/{reading.state}/acc" in result["scores"] else None


@dataclass(frozen=True)
class Judgement:
    """What seeds say of one ordering under one reading.

    Args:
        outcome: ``holds`` or ``reversed``, beyond chance; ``level``: the same number in every seed; ``undecided``; or
            why it was not judged.
        gap: mean over seeds of what the upper row has above the lower one.
        p: of the paired t-test, two-sided; None where there is none.
    """

    outcome: Outcome
    gap: float | None = None
    p: float | None = None

    def __str__(self) -> str:
        gap = "" if self.gap is None else f"{self.gap:+.2f}"
        return gap if self.p is None else f"{gap}, p {'< 0.001' if self.p < 0.001 else f'{self.p:.3f}'}"


def gaps(above: Mapping[int, float], below: Mapping[int, float]) -> dict[int, float]:
    """Return, by seed, how far one row is above another, for the seeds that both have."""
    return {seed: above[seed] - below[seed] for seed in sorted(above.keys() & below.keys())}


def judge(above: Mapping[int, float], below: Mapping[int, float]) -> Judgement:
    """Judge whether one row is above another, by a paired t-test over the seeds that both have.

    A sign or permutation test could not decide anything with three seeds: its least two-sided p is 0.25. Where the
    difference is the same in every seed, as of costs, its sign decides.

    Args:
        above: by seed, the row that the paper has above.
        below: by seed, the other one.
    """
    differences = list(gaps(above, below).values())
    if not differences:
        return Judgement("not measured")
    gap = fmean(differences)
    if len(differences) < SEEDS:
        return Judgement("too few seeds", gap)
    sign: Outcome = "level" if gap == 0 else "holds" if gap > 0 else "reversed"
    if max(differences) == min(differences):
        return Judgement(sign, gap)
    p = float(ttest_1samp(differences, 0.0).pvalue)
    return Judgement(sign if p < LEVEL else "undecided", gap, p)


def verdict(judgements: Mapping[str, Judgement]) -> str:
    """Return what the judgements of an ordering come to: where it holds, ``neither``, or ``open``.

    ``neither``: it is reversed, or both rows are level, under every reading; of one reading alone that is said instead.
    ``open``: it holds under no reading, and one of them is undecided or was not measured. Where no reading has seeds
    enough, that is said.

    Args:
        judgements: by the name of the reading.
    """
    if where := [name for name, judgement in judgements.items() if judgement.outcome == "holds"]:
        return f"holds {' and '.join(where)}".strip()
    outcomes = {judgement.outcome for judgement in judgements.values()}
    if outcomes - {"not measured"} == {"too few seeds"}:
        return "too few seeds"
    if not outcomes <= {"reversed", "level"}:
        return "open"
    return "neither" if len(judgements) > 1 else outcomes.pop()


def counts(verdicts: Sequence[str]) -> str:
    """Return how many orderings have which verdict, those that hold first and open ones last."""
    order = sorted(set(verdicts), key=lambda v: (not v.startswith("holds"), v == "open", v))
    return ", ".join(f"{v}: {verdicts.count(v)}" for v in order)
