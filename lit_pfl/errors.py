"""The ways in which something from outside can be wrong."""


class ConfigError(ValueError):
    """An option is wrong. The message is one line: it names the option and says what would be right."""


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
