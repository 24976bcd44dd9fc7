"""Configuration files: find them by name, and read each with the fragments that it builds on."""

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

import yaml

from lit_pfl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
#: the configurations that come with lit-pfl: inside an installed package, next to it in a copy of the repository
FOLDER = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"
ENDING = ".yaml"
#: the option that names a configuration file, short and long
CONFIG = ("-c", "--config")


def names() -> list[str]:
    """Return the names of the configurations that come with lit-pfl, such as ``simfed`` and ``logger/wandb``."""
    found = (path.relative_to(FOLDER).as_posix().removesuffix(ENDING) for path in FOLDER.rglob(f"*{ENDING}"))
    return sorted(found, key=lambda name: (name.count("/"), name))


def find(name: str, beside: Path = Path()) -> Path | None:
    """Return a configuration file: the user's own, or else the one that comes with lit-pfl; None without either.

    Args:
        name: a path, or a name of :func:`names`; the ending may be left out, and ``configs/`` may stand before it.
        beside: the folder that a path is relative to.
    """
    with suppress(OSError):  # of what is YAML, and too long for a path
        for path in (beside / name, FOLDER / name.removeprefix("configs/")):
            for file in (path, Path(f"{path}{ENDING}")):
                if file.is_file():
                    return file
    return None


def hint(name: str) -> str:
    """Return what to do about a name that :func:`find` does not know."""
    known = {one.rpartition("/")[2]: one for one in reversed(names())} | {one: one for one in names()}
    near = get_close_matches(name.removeprefix("configs/").removesuffix(ENDING).lower(), known, n=1, cutoff=0.7)
    return f"Did you mean {known[near[0]]}?" if near else "`lit-pfl configs` lists all."


def located(config: str) -> Path | None:
    """Return the file that an option ``--config`` names; None where it is YAML itself.

    Raises:
        ConfigError: when there is no such file.
    """
    file = find(config)
    if file is None and not set(config) & set("{}[]:\n"):
        raise ConfigError(f"config={config}: there is no such file, and no configuration of this name. {hint(config)}")
    return file


def with_fragments(file: str, above: tuple[Path, ...] = ()) -> list[str]:
    """Return the files to read for a configuration file, in order: all that it builds on, and itself.

    Args:
        file: the file, or its name.
        above: the files that it is a fragment of.

    Raises:
        ConfigError: when there is no such file, when it is not YAML or holds no options, or when a fragment is not
            there or builds on a file that is built on it.
    """
    path = located(file)
    if path is None:
        return [file]
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config={file}: it is not a text file.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config={file}: it holds no options by name, such as `trainer: {{max_epochs: 5}}`.")
    fragments = content.get("fragments") or []
    if not isinstance(fragments, list):
        raise ConfigError(f"{file}: fragments: give a list of files, not {fragments!r}.")
    above = (*above, path.resolve())
    files: list[str] = []
    for name in map(str, fragments):
        fragment = find(name, path.parent)
        if fragment is None:
            raise ConfigError(f"{file}: fragments: there is no file {path.parent / name}. {hint(name)}")
        if fragment.resolve() in above:
            raise ConfigError(f"{file}: fragments: {fragment} is built on this very file.")
        files += with_fragments(str(fragment), above)
    return [*files, str(path)]
