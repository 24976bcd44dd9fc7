"""How long FedSLR's common model takes for a batch of 20 images, by its factors and as a dense network (Table 9).

    python tests/benchmarks/inference.py [--threads N] [--repeats N]

ResNet-18 with group norm and 10 classes, every weight cut to that share of its parameters which is left in the paper's
Table 9. Both networks take turns in one process; the least of the repeats counts.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from lit_pfl.export import to_factors
from lit_pfl.models import ResNet18
from lit_pfl.ops.low_rank import as_matrix, as_weight

#: lambda in Table 9, and the millions of parameters it leaves
SIZES = {1e-5: 7.33, 5e-5: 6.56, 1e-4: 5.54, 5e-4: 3.09, 1e-3: 1.27}
WHOLE = 11.17


@torch.no_grad()
def cut(network: nn.Module, share: float) -> None:
    """Leave every matrix the rank whose factors have a share of its elements."""
    for weight in network.parameters():
        if weight.dim() > 1:
            u, s, vt = torch.linalg.svd(as_matrix(weight), full_matrices=False)
            rank = max(1, round(share * weight.numel() / (u.shape[0] + vt.shape[1])))
            weight.copy_(as_weight((u[:, :rank] * s[:rank]) @ vt[:rank], tuple(weight.shape)))


def milliseconds(networks: list[nn.Module], images: Tensor, repeats: int) -> list[float]:
    least = [float("inf")] * len(networks)
    for _ in range(repeats):
        for i, network in enumerate(networks):
            began = time.perf_counter()
            network(images)
            least[i] = min(least[i], time.perf_counter() - began)
    return [1000 * seconds for seconds in least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    images = torch.randn(20, 3, 32, 32)
    print(f"{arguments.threads} threads\nlambda   million parameters   dense, ms   factors, ms   ratio")
    for lam, millions in SIZES.items():
        network = ResNet18(3, 10, norm="group", bias=False).eval()
        cut(network, millions / WHOLE)
        factored = to_factors(network, tolerance=1e-5)
        size = sum(p.numel() for p in factored.parameters()) / 1e6
        with torch.inference_mode():
            error = (factored(images) - network(images)).abs().max()
            assert error < 1e-3, error
            dense, by_factors = milliseconds([network, factored], images, arguments.repeats)
        print(f"{lam:<8.0e} {size:18.2f} {dense:11.1f} {by_factors:13.1f} {dense / by_factors:7.2f}", flush=True)


if __name__ == "__main__":
    main()
