"""Start all of a federation with secure aggregation on this machine: a SuperLink, four SuperNodes, and a run.

python run.py                                 # FedAvg
python run.py method=FedRep rounds=10         # other options of pyproject.toml
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "flower"))

from loopback import Loopback, options_of


def main(options: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lit-pfl-secure-"))
    print(f"Logs, certificates and results are in {folder}.")
    with Loopback(folder, HERE) as federation:
        for client, node in enumerate(("north", "south", "east", "west")):
            federation.register(node)
            federation.start_supernode(node, [client])
        print(federation.run(**options_of(options)).stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
