"""Folders of runs."""

from pathlib import Path


def resumed_folder(ckpt_path: str | Path | None) -> Path | None:
    """Return the run folder that a checkpoint lies in, so that the resumed run goes on there; None if in none."""
    folder = Path(ckpt_path).absolute().parent.parent if ckpt_path else None
    return folder if folder is not None and (folder / "metrics.csv").exists() else None
