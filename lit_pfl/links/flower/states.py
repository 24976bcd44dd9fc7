"""What a client keeps to itself between two messages, in files of its SuperNode."""

from pathlib import Path

from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import AtomicCheckpointIO, read_whole


class States:
    """A client's state after its latest two rounds.

    The server says with every message which of a client's answers was the last that it got. The client continues from
    the state that belongs to it, also where it has trained further since: then the answer was lost on the way, came too
    late, or the server has been restarted from a checkpoint. So client and server always agree.

    Args:
        folder: the node's folder.
        run: the run's name, which the server draws when it begins.
        client: the client's id.

    Raises:
        ConfigError: for a name that would lead out of the folder.
    """

    def __init__(self, folder: Path, run: str, client: int) -> None:
        if not run.isalnum():
            raise ConfigError(f"The run's name must be letters and digits, not {run!r}.")
        self.folder, self.client = folder / run / f"client{client}", client

    def take_up(self, engine: Local, answered: int) -> None:
        """Put the client into the state after the last round that it has answered; 0 is before any.

        Raises:
            ConfigError: when that state is not here.
        """
        if not answered:
            return
        path = self._path(answered)
        if not path.exists():
            raise ConfigError(
                f"Client {self.client}: its state after round {answered} is not in {self.folder}. Give its node the "
                "folder that it had, or begin another run."
            )
        engine.load_state_dict(read_whole(path))

    def keep(self, engine: Local, round: int, answered: int) -> None:
        """Write the state after a round; forget all others but that which it began with, should the answer be lost."""
        AtomicCheckpointIO().save_checkpoint(engine.state_dict(), self._path(round))
        for path in self.folder.glob("round*.ckpt"):
            if path not in (self._path(round), self._path(answered)):
                path.unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"round{round}.ckpt"
