"""Programs to start from; a package, so that none that is installed under its name comes first."""
