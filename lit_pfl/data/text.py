"""Text, a client a file or a speaker, for learning which character comes next."""

import re
from pathlib import Path

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor

from lit_pfl.data.eval_split import check_fractions
from lit_pfl.data.federated import ClientData, FederatedDataModule
from lit_pfl.data.resident import ResidentLoader
from lit_pfl.errors import ConfigError, check_options_of


class Text(FederatedDataModule):
    """Texts, each with a client of its own, cut into windows of characters.

    A sample is a pair of int64 tensors (T,): the characters of a window, and those that follow each of them. Windows
    do not overlap except for that one character. The first part of a client's text is for training, the next for
    validation and the last for testing, so that none of it is seen before it is tested on. A client whose training
    part is shorter than a window takes no part; one whose other parts are has no such data.

    The vocabulary is every character that occurs in the files, also in parts that no client trains on. All clients
    have it in common: it is the one thing that they share before the first round.

    Args:
        source: a folder, or a list of files, in UTF-8. By default the topics of Python's own ``help()``, one a client.
        files: which files of a folder, and of those in it, are read.
        speaker: a regular expression that finds where somebody begins to speak, with the name as its first group; then
            everybody who speaks has a client, with all that they say. ``^`` is the beginning of a line. Without it,
            every file has one. What comes before the first speaker of a file is not used.
        window: T, characters in a window.
        batch_size: windows in a training batch.
        eval_batch_size: windows in a validation or test batch.
        train_fraction: share of every client's text to train on.
        test_fraction: share of it to test on; the rest is for validation.
        drop_last: whether a last training batch that is not full is left out, for models that carry their state from
            batch to batch.

    Attributes:
        names: the speaker or file of every client, by its id.
        characters: the vocabulary, in the order of codes; there after :meth:`setup`.
        vocab_size: their number.

    Raises:
        ConfigError: for options that do not suit the files.

    Example:
        >>> data = Text(window=32)
        >>> data.setup()
        >>> inputs, targets = next(iter(data.client(0).train))
        >>> inputs.shape[1], targets.shape[1]
        (32, 32)
    """

    names: list[str]
    characters: str

    def __init__(
        self,
        source: str | list[str] | None = None,
        files: str = "*.txt",
        speaker: str | None = None,
        window: PositiveInt = 64,
        batch_size: PositiveInt = 32,
        eval_batch_size: PositiveInt = 128,
        train_fraction: float = 0.8,
        test_fraction: float = 0.1,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        check_fractions(train_fraction, test_fraction)
        self.source = source
        self.files = files
        self.speaker = speaker
        self.window = window
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.train_fraction = train_fraction
        self.test_fraction = test_fraction
        self.drop_last = drop_last
        self.codes: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Number of characters; there after :meth:`setup`."""
        return len(self.characters)

    def setup(self, stage: str | None = None) -> None:
        """Read the texts, once."""
        if self.codes is not None:
            return
        check_options_of(self, "data")
        texts = self._read()
        vocabulary = np.unique(np.concatenate([_code_points(text) for text in texts.values()]))
        self.characters = "".join(map(chr, vocabulary))
        if self.speaker is not None:
            texts = self._by_speaker(texts)
        self.names = list(texts)
        ends = np.cumsum([len(text) for text in texts.values()])
        self._starts = [
            self._windows(end - len(text), len(text)) for end, text in zip(ends, texts.values(), strict=True)
        ]
        if not self.clients:
            raise ConfigError(
                f"data.window={self.window} is longer than the training part of every one of the {len(texts)} texts; "
                "give a smaller one."
            )
        # in the fewest bytes that hold them; a batch widens its own
        dtype = np.uint8 if len(vocabulary) <= 256 else np.int32
        codes = np.searchsorted(vocabulary, _code_points("".join(texts.values()))).astype(dtype)
        self.codes = torch.from_numpy(codes)

    def _read(self) -> dict[str, str]:
        """Return the texts by file."""
        if self.source is None:
            from pydoc_data.topics import topics

            return dict(sorted(topics.items()))
        if isinstance(self.source, str):
            folder = Path(self.source)
            try:
                paths = sorted(path for path in folder.rglob(self.files) if path.is_file())
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(f"data.files={self.files!r}: {error}; give a pattern such as '*.txt'.") from None
            names = [str(path.relative_to(folder)) for path in paths]
            if not paths:
                what = f"holds no file {self.files!r}" if folder.is_dir() else "is not a folder"
                raise ConfigError(f"data.source={self.source!r} {what}; give a folder of texts, or a list of files.")
        else:
            names, paths = self.source, [Path(file) for file in self.source]
            if not paths:
                raise ConfigError("data.source=[]: give at least one file.")
        return {name: _content(path) for name, path in zip(names, paths, strict=True)}

    def _by_speaker(self, texts: dict[str, str]) -> dict[str, str]:
        try:
            pattern = re.compile(self.speaker or "", re.MULTILINE)
        except re.error as error:
            raise ConfigError(f"data.speaker={self.speaker!r} is not a regular expression: {error}.") from None
        if not pattern.groups:
            raise ConfigError(
                f"data.speaker={self.speaker!r} has no group for the name; put it in parentheses, like '^([A-Z]+): '."
            )
        said: dict[str, list[str]] = {}
        for text in texts.values():
            found = list(pattern.finditer(text))
            ends = [*(match.start() for match in found), len(text)][1:]
            for match, end in zip(found, ends, strict=True):
                said.setdefault((match[1] or "").strip(), []).append(text[match.end() : end])
        if not said:
            raise ConfigError(f"data.speaker={self.speaker!r} finds nobody in the {len(texts)} texts.")
        return {name: "".join(said[name]) for name in sorted(said)}

    def _windows(self, start: int, length: int) -> dict[str, Tensor]:
        """Return where a client's windows start, by part, when its text starts there."""
        num_train, num_test = round(length * self.train_fraction), round(length * self.test_fraction)
        cuts = {"train": (0, num_train), "val": (num_train, length - num_test), "test": (length - num_test, length)}
        return {
            part: torch.arange(start + begin, max(start + begin, start + end - self.window), self.window)
            for part, (begin, end) in cuts.items()
        }

    @property
    def clients(self) -> list[int]:
        """Ids of the clients whose training part has a window."""
        return [client for client, starts in enumerate(self._starts) if len(starts["train"])]

    def client(self, client_id: int) -> ClientData:
        """Return a client's data; ``num_classes`` is None, since a sample has many labels."""
        assert self.codes is not None, "setup() comes first"
        if not 0 <= client_id < len(self.names):
            raise ConfigError(f"There is no client {client_id}; there are {len(self.names)} texts.")
        codes, starts = self.codes, self._starts[client_id]

        def loader(part: str) -> "WindowLoader":
            own = starts[part].to(codes.device)
            if part == "train":
                return WindowLoader(codes, own, self.window, self.batch_size, shuffle=True, drop_last=self.drop_last)
            return WindowLoader(codes, own, self.window, self.eval_batch_size)

        blank = torch.zeros(1, self.window, dtype=torch.int64)
        return ClientData(loader("train"), loader("val"), loader("test"), example=(blank, blank.clone()))

    def move_to(self, device: torch.device) -> None:
        """Hold the texts on a device."""
        assert self.codes is not None, "setup() comes first"
        self.codes = self.codes.to(device)


class WindowLoader(ResidentLoader):
    """Batches of windows: (B, T) int64 codes of characters, and (B, T) of the characters that follow.

    Args:
        codes: (N,) integers, the text of all clients.
        starts: (n,) where this client's windows start.
        window: T.
        batch_size: windows a batch.
        shuffle: whether windows come in another order in every epoch.
        drop_last: whether to leave out a last batch that is not full.
    """

    def __init__(
        self,
        codes: Tensor,
        starts: Tensor,
        window: int,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(starts, batch_size, shuffle, drop_last)
        self.codes = codes
        self.span = torch.arange(window + 1, device=codes.device)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that start there, and what follows."""
        windows = self.codes[indices[:, None] + self.span].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.source: {path} cannot be read as a text in UTF-8: {error}.") from None
