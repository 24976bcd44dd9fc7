"""Which options of a federation are right, and which go together."""

from lit_pfl.core.asynchronous import Asynchronous
from lit_pfl.core.checks import check_quorum
from lit_pfl.core.deadline import Deadline
from lit_pfl.core.participation import Participation, check_participation
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.engines import Engine
from lit_pfl.errors import ConfigError
from lit_pfl.randomness import check_share

#: PyTorch can start as many; with 100,000 the process is gone without a word
MOST_THREADS = 1024


def check_options(
    participation: float | Participation,
    evaluate_clients: float,
    evaluate: str,
    keep_trained: bool,
    quorum: float,
    engine: object,
    threads: int | None,
) -> None:
    """See that options are in range; see :class:`~lit_pfl.Federation` for them."""
    check_participation(participation)
    check_share("federation.evaluate_clients", evaluate_clients)
    check_quorum("federation.quorum", quorum)
    if not isinstance(engine, Engine | None):
        raise ConfigError(f"federation.engine={engine!r}: give an engine, such as Local() or Stacked(size=32).")
    if threads is not None and threads > MOST_THREADS:
        raise ConfigError(f"federation.threads={threads}: give at most {MOST_THREADS}, better as many as cores.")
    if evaluate == "before" and not keep_trained:
        raise ConfigError(
            "federation.evaluate=before scores models as they have trained, which federation.keep_trained=False does "
            "not keep; choose evaluate=after or global."
        )


def check_together(privacy: ClientPrivacy | None, deadline: Deadline | None, asynchronous: Asynchronous | None) -> None:
    """See that options go together; see :class:`~lit_pfl.Federation` for them."""
    if deadline is not None and deadline.wanted and privacy is not None and privacy.where == "central":
        raise ConfigError(
            "federation.deadline.wanted: who is slower than one client decides whether another one counts, which "
            "federation.privacy does not account for; leave wanted out, or set federation.privacy.where=local."
        )
    if asynchronous is not None and (deadline is not None or privacy is not None):
        other = "privacy" if deadline is None else "deadline"
        raise ConfigError(f"federation.asynchronous does not go with federation.{other}; leave one of them out.")
