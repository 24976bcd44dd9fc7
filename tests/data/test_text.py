"""Windows of characters, a client a text or a speaker."""

from pydoc_data.topics import topics

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.lstm import LightningLSTM

from lit_pfl.data import Text, in_batches_of, in_order, num_samples, part_of
from lit_pfl.errors import ConfigError
from tiny import trainer

PLAY = """A play. Nobody says this.
ANNA: To be, or not
BEN: That is the question.
ANNA: Whether
it is nobler?
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "b.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 10)
    (tmp_path / "texts" / "a.txt").write_text("the same over and over. " * 9)
    (tmp_path / "texts" / "more" / "c.txt").write_text("été ☃ " * 20, encoding="utf-8")
    (tmp_path / "texts" / "short.txt").write_text("short")
    (tmp_path / "texts" / "notes.md").write_text("# no text")
    return tmp_path / "texts"


def ready(source=None, **options) -> Text:
    data = Text(str(source) if source is not None else None, **options)
    data.setup()
    return data


def decoded(data, loader) -> list[tuple[str, str]]:
    def text(codes):
        return "".join(data.characters[code] for code in codes)

    return [(text(x), text(y)) for batch in in_order(loader) for x, y in zip(*batch, strict=True)]


def test_a_client_a_file(folder):
    data = ready(folder, window=8)
    assert data.names == ["a.txt", "b.txt", "more/c.txt", "short.txt"]
    assert data.clients == [0, 1, 2]  # one is too short
    for k, name in enumerate(data.names[:3]):
        text = (folder / name).read_text(encoding="utf-8")
        cut = round(0.8 * len(text))
        expected = [(text[i : i + 8], text[i + 1 : i + 9]) for i in range(0, cut - 8, 8)]
        assert decoded(data, data.client(k).train) == expected
        assert data.client(k).num_samples == len(expected)


def test_nothing_is_tested_that_was_seen_in_training(folder):
    data = ready(folder, window=4)
    text = (folder / "b.txt").read_text()
    parts = {}
    for part in ("train", "val", "test"):
        windows = decoded(data, getattr(data.client(1), part))
        parts[part] = windows[0][0] + "".join(target[-4:] for _, target in windows)[3:]
    # the parts are pieces of the text, one after another, each but for what no longer fills a window
    assert text[:208].startswith(parts["train"])
    assert text[208:234].startswith(parts["val"])
    assert text[234:].startswith(parts["test"])
    assert all(len(parts[part]) > size - 4 for part, size in [("train", 208), ("val", 26), ("test", 26)])


def test_the_vocabulary_is_of_all_files(folder):
    data = ready(folder, window=8)
    everything = "".join((folder / name).read_text(encoding="utf-8") for name in data.names)
    assert data.characters == "".join(sorted(set(everything)))
    assert data.vocab_size == len(set(everything))
    assert "☃" in data.characters
    assert "#" not in data.characters


def test_files_may_be_chosen_or_listed(folder):
    assert ready(folder, files="*.md", window=3).names == ["notes.md"]
    data = Text([str(folder / "b.txt"), str(folder / "a.txt")], window=8)
    data.setup()
    assert [name.rpartition("/")[2] for name in data.names] == ["b.txt", "a.txt"]


def test_a_client_a_speaker(tmp_path):
    (tmp_path / "one.txt").write_text(PLAY)
    (tmp_path / "two.txt").write_text("BEN: Once more.\n")
    data = ready(tmp_path, speaker=r"^([A-Z]+): ", window=3, train_fraction=0.9, test_fraction=0.1)
    assert data.names == ["ANNA", "BEN"]
    said = ["To be, or not\nWhether\nit is nobler?\n", "That is the question.\nOnce more.\n"]
    for k, text in enumerate(said):
        cut = round(0.9 * len(text))
        expected = [(text[i : i + 3], text[i + 1 : i + 4]) for i in range(0, cut - 3, 3)]
        assert decoded(data, data.client(k).train) == expected
    assert "N" in data.characters  # of what nobody says, too


def test_many_characters_take_more_bytes(tmp_path):
    (tmp_path / "all.txt").write_text("".join(chr(c) for c in range(0x4E00, 0x4E00 + 300)) * 2, encoding="utf-8")
    data = ready(tmp_path, window=7)
    assert data.codes.dtype == torch.int32
    assert decoded(data, data.client(0).train)[42][0] == "".join(chr(0x4E00 + 42 * 7 + i) for i in range(6)) + chr(
        0x4E00
    )
    assert ready(window=7).codes.dtype == torch.uint8


def test_without_a_source_it_is_pythons_help():
    data = ready()
    assert data.names == sorted(topics)
    k = data.names.index("assignment")
    assert decoded(data, data.client(k).train)[0][0] == topics["assignment"][:64]
    assert 50 < len(data.clients) <= len(topics)


def test_batches():
    data = ready(batch_size=5)
    client = data.client(data.clients[0])
    for x, y in client.train:
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape
        assert x.shape[1] == 64
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert torch.equal(x[:, 1:], y[:, :-1])
    assert client.num_classes is None
    assert client.example[0].shape == client.example[1].shape == (1, 64)


def test_training_is_shuffled_by_the_default_generator():
    train = ready(window=16).client(3).train
    epochs = [[x.tolist() for x, _ in train] for _ in range(2)]
    assert epochs[0] != epochs[1]
    torch.manual_seed(1)
    first = [x.tolist() for x, _ in train]
    torch.manual_seed(1)
    assert first == [x.tolist() for x, _ in train]


@pytest.mark.parametrize(("n", "sizes"), [(10, [4, 4]), (8, [4, 4]), (4, [4]), (3, [3]), (1, [1]), (0, [])])
def test_batches_that_are_not_full_may_be_left_out(n, sizes):
    data = ready(window=4, batch_size=4, drop_last=True)
    part = part_of(data.client(0).train, torch.arange(n))
    assert [len(x) for x, _ in part] == sizes
    assert len(part) == len(sizes)
    assert sum(len(x) for x, _ in in_order(part)) == n
    assert num_samples(part) == n
    assert {len(x) for x, _ in in_batches_of(part, 3)} <= {3, n if n < 3 else 3}


class Language(LightningTransformer):
    """Lightning's own, without its download."""

    def prepare_data(self) -> None:
        pass


class Memory(LightningLSTM):
    """Lightning's own, without its download; it carries its state from batch to batch."""

    def prepare_data(self) -> None:
        pass


@pytest.mark.parametrize("module", [Language, Memory])
def test_language_models_of_lightning_read_it(module: type[L.LightningModule]):
    data = Text(window=16, batch_size=8, drop_last=True)
    data.setup()
    train = data.client(data.names.index("del")).train
    assert num_samples(train) > 17
    for n in (3, 17):
        trainer(1).fit(module(vocab_size=data.vocab_size), part_of(train, torch.arange(n)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "nowhere"}, "data.source='nowhere' is not a folder; give a folder of texts, or a list of files"),
        ({"source": ".", "files": "*.tex"}, r"data.source='.' holds no file '\*.tex'"),
        ({"source": ".", "files": "/tmp/*.txt"}, r"data.files='/tmp/\*.txt': .*; give a pattern such as '\*.txt'"),
        ({"source": []}, "give at least one file"),
        ({"source": ["nothing.txt"]}, "nothing.txt cannot be read as a text in UTF-8: .*No such file"),
        ({"source": ["binary.txt"]}, "binary.txt cannot be read as a text in UTF-8: .*codec"),
        ({"source": ["empty.txt"]}, "data.window=64 is longer than the training part of every one of the 1 texts"),
        ({"window": 10**6}, "data.window=1000000 is longer than the training part of every one of the"),
        ({"speaker": "^[A-Z]+: "}, r"has no group for the name; put it in parentheses"),
        ({"speaker": "(["}, "is not a regular expression: "),
        ({"speaker": "^(nobody at all): "}, "finds nobody in the"),
        ({"train_fraction": 0.9, "test_fraction": 0.2}, "data.train_fraction=0.9 and data.test_fraction=0.2 must"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=message) as error:
        Text(**options).setup()
    assert "\n" not in str(error.value)


def test_there_is_no_client_beyond_the_last(folder):
    with pytest.raises(ConfigError, match="no client 4; there are 4 texts"):
        ready(folder, window=8).client(4)
