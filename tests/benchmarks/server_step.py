"""How long FedSLR's server step takes for ResNet-18, against a plain decomposition of every layer.

    python tests/benchmarks/server_step.py [--threads N] [--repeats N]

All 62 tensors of ResNet-18 with group norm and 10 classes, of which 21 are shrunk at lambda * eta_g = 1e-3, as they are
in round 1, and in later rounds, when the model has so many parameters left as in the paper's tables. There, singular
values fall off as 1/i and cross the threshold without a gap; and a round has made the kept ones grow, and added another
matrix with such values to each. Both ways are timed in turns in one process; the least of the repeats counts.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_pfl.low_rank import as_matrix
from lit_pfl.models import ResNet18
from lit_pfl.ops import Factors, threshold_singular_values

THRESHOLD = 1e-3
#: millions of parameters of the low-rank model: lambda = 1e-3 and 5e-4 (Table 3), CIFAR-10, CIFAR-100 (Table 2)
LATER = (1.27, 3.09, 3.51, 5.54)


def plain(matrices: list[Tensor]) -> list[Tensor]:
    """Shrink each by itself, in full."""
    result = []
    for matrix in matrices:
        u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        result.append((u * (s - THRESHOLD).clamp(min=0)) @ vt)
    return result


def falling_off(matrix: Tensor, share: float) -> Tensor:
    """Return a matrix of this shape with values that cross the threshold where a share of its parameters is left."""
    m, n = matrix.shape
    u, v = (torch.linalg.qr(torch.randn(size, min(m, n))).Q for size in (m, n))
    return u * (THRESHOLD * share * m * n / (m + n) / torch.arange(1, min(m, n) + 1)) @ v.T


def a_round_later(before: Factors, share: float) -> Tensor:
    """Let what was kept grow by nearly what was taken from it, and add something else."""
    grown = (before.left.norm(dim=0) ** 2 + 0.9 * THRESHOLD) / before.left.norm(dim=0) ** 2
    matrix = (before.left * grown) @ before.right
    return matrix + 0.3 * falling_off(matrix, share)


def best(call: Callable[[], list], repeats: int) -> tuple[float, list]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return min(seconds), result


def report(name: str, matrices: list[Tensor], near: list[Tensor | None], repeats: int) -> None:
    slow, expected = best(lambda: plain(matrices), repeats)
    fast, factors = best(lambda: threshold_singular_values(matrices, THRESHOLD, near), repeats)
    dense, factored = best(lambda: [f.left @ f.right for f in factors], repeats)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(factored, expected, strict=True) if b.any())
    kept = sum(min(f.left.numel() + f.right.numel(), m.numel()) for f, m in zip(factors, matrices, strict=True))
    print(
        f"{name:28} {kept / 1e6:8.2f} {slow:8.2f} {fast + dense:8.2f} {slow / (fast + dense):7.1f}   {worst:.0e}",
        flush=True,
    )


def training_step(network: nn.Module) -> None:
    images, labels = torch.randn(20, 3, 32, 32), torch.randint(10, (20,))
    nn.functional.cross_entropy(network(images), labels).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    network = ResNet18(3, 10, norm="group", bias=False)
    matrices = [as_matrix(p.detach()) for p in network.parameters() if p.dim() > 1]
    print(f"{len(matrices)} matrices, {arguments.threads} threads")
    print(f"{'':28} {'million':>8} {'plain,':>8} {'here,':>8}")
    print(f"{'':28} {'params':>8} {'s':>8} {'s':>8} {'faster':>7}   difference")
    report("round 1", matrices, [None] * len(matrices), arguments.repeats)
    for millions in LATER:
        share = millions / 11.17
        before = threshold_singular_values([falling_off(m, share) for m in matrices], THRESHOLD)
        later = [a_round_later(f, share) for f in before]
        report(f"later, about {millions} million", later, [f.right for f in before], arguments.repeats)
    seconds, _ = best(lambda: [training_step(network)], arguments.repeats)
    print(f"A round of 10 participants trains 10 x 75 batches: {750 * seconds:.0f} s here.")


if __name__ == "__main__":
    main()
