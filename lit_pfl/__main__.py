"""``python -m lit_pfl`` is ``lit-pfl``."""

from lit_pfl.cli import main

if __name__ == "__main__":
    main()
