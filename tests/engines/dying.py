"""Methods that fail in one of a run's processes, for tests that start such."""

import os
import signal

from lit_pfl.methods import FedAvg


class Dies(FedAvg):
    """One process fails in round 3, in the way that the environment says: it is killed, raises an error or hangs."""

    def begin_round(self) -> None:
        super().begin_round()
        how = os.environ.get("DIES")
        if how and self.completed_rounds == 2 and self.spec.client_id == int(os.environ["DIES_WITH_CLIENT"]):
            if how == "error":
                raise ArithmeticError("no more")
            os.kill(os.getpid(), getattr(signal, how))
