"""Configuration files: read with the fragments that they build on."""

from pathlib import Path

import yaml

from lit_pfl.errors import ConfigError


def with_fragments(file: str, above: tuple[Path, ...] = ()) -> list[str]:
    """Return the files to read for a configuration file, in order: all that it builds on, and itself.

    Args:
        file: the file.
        above: the files that it is a fragment of.

    Raises:
        ConfigError: when a file is not YAML or holds no options, or a fragment is not there or builds on a file that is
            built on it.
    """
    path = Path(file)
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config={file}: it is no text file.") from None
    except (OSError, ValueError):
        return [file]  # the parser says what is wrong
    if not isinstance(content, dict):
        raise ConfigError(f"config={file}: it holds no options by name, such as `trainer: {{max_epochs: 5}}`.")
    fragments = content.get("fragments") or []
    if not isinstance(fragments, list):
        raise ConfigError(f"{file}: fragments: give a list of files, not {fragments!r}.")
    above = (*above, path.resolve())
    files: list[str] = []
    for fragment in (path.parent / str(name) for name in fragments):
        if not fragment.is_file():
            raise ConfigError(f"{file}: fragments: there is no file {fragment}.")
        if fragment.resolve() in above:
            raise ConfigError(f"{file}: fragments: {fragment} is built on this very file.")
        files += with_fragments(str(fragment), above)
    return [*files, file]
