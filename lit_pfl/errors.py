"""The ways in which something from outside can be wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

#: what code of others may raise for what does not suit it
WRONG = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class ConfigError(ValueError):
    """An option is wrong. The message names it and says what would be right.

    Args:
        message: put on one line: it may quote another library's error of several.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines() if line.strip()))


class UploadError(ValueError):
    """An upload cannot be used. The message names the client and the tensor.

    Args:
        message: what is wrong.
        tensor: name of the tensor that is wrong, if it is one.

    Attributes:
        client: whose upload it is, once it has been refused.
    """

    client: int | None = None

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class LateUpload(UploadError):
    """An upload that comes after its round has ended."""


class PayloadError(ValueError):
    """Bytes are no payload, or not the one that is expected.

    Args:
        message: what is wrong.
        tensor: name of the tensor that is wrong, if it is one.
    """

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class SaveError(OSError):
    """A file cannot be written. The message names it, and says what is left."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def refuse_other_lightning(option: str, thing: object, kind: str) -> None:
    """See that an object is not of ``pytorch_lightning``, a package that has Lightning's classes once more.

    Args:
        option: where it was given.
        thing: the object.
        kind: which of Lightning's classes it should be of.

    Raises:
        ConfigError: when it is.
    """
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in type(thing).__mro__):
        raise ConfigError(
            f"{option}: {type(thing).__name__} is made with pytorch_lightning, whose classes do not mix with those of "
            f"lightning; write `import lightning as L` and L.{kind}."
        )


@contextmanager
def within_memory(option: str) -> Iterator[None]:
    """Make tensors whose size an option decides.

    Args:
        option: the option, with its value.

    Raises:
        ConfigError: when there is not enough memory for them.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # what PyTorch raises, depending on how large it is
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in ("allocate", "verflow")):
            raise
        raise ConfigError(
            f"{option}: there is not enough memory for tensors of that size; set a smaller number."
        ) from None
