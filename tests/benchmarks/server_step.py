"""How long FedSLR's server step takes for ResNet-18, against a plain decomposition of every layer.

    python tests/benchmarks/server_step.py [--threads N] [--repeats N]

All 62 tensors of ResNet-18 with group norm and 10 classes, of which 21 are shrunk at lambda * eta_g = 1e-3: as they are
in round 1, and in later rounds, when the model has so many parameters left as in the paper's tables. Singular values
there are

* as in a run: a hundredth of them a hundred to some thousand times the threshold, the others evenly spread from twenty
  times the threshold to none; a round has made the kept ones grow, turned them a little, and added three directions
  at twice the threshold, one in fifteen from 0.6 to 0.2 of it, and noise below that;
* or crowded about the threshold, which runs have not shown: they fall off as 1/i, and a round has added another matrix
  with such values.

Both ways are timed in turns in one process; the least of the repeats counts. A round is that of 10 participants with
500 images each, three epochs.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_pfl.models import ResNet18
from lit_pfl.ops import Factors, threshold_singular_values
from lit_pfl.ops.low_rank import as_matrix

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


def crowded(matrix: Tensor, share: float) -> tuple[Factors, Tensor]:
    """Return what was sent in a round, and the matrix of the next: values fall off as 1/i."""
    [before] = threshold_singular_values([falling_off(matrix, share)], THRESHOLD)
    grown = (before.left.norm(dim=0) ** 2 + 0.9 * THRESHOLD) / before.left.norm(dim=0) ** 2
    return before, (before.left * grown) @ before.right + 0.3 * falling_off(matrix, share)


def as_in_a_run(matrix: Tensor, share: float) -> tuple[Factors, Tensor]:
    """Return the same with values as trained networks have them."""
    m, n = matrix.shape
    rank, few = max(1, round(share * m * n / (m + n))), min(m, n) // 100
    values = THRESHOLD * torch.cat([3000 / torch.arange(1, few + 1), torch.linspace(20, 0, rank + 2)[1:-1]])[:rank]
    root, rank = values.sqrt(), len(values)
    u, v = (torch.linalg.qr(torch.randn(size, rank)).Q for size in (m, n))
    turned = torch.diag(values + 0.9 * THRESHOLD) + 0.05 * root[:, None] * torch.randn(rank, rank) / rank**0.5 * root
    above, below = torch.full((3,), 2.0), torch.linspace(0.6, 0.2, min(m, n) // 15)
    new = torch.cat([above, below]) * torch.randn(m, 3 + len(below)) / m**0.5 @ torch.randn(3 + len(below), n) / n**0.5
    noise = 0.2 * torch.randn(m, n) / (m**0.5 + n**0.5)
    return Factors(u * root, (v * root).T), u @ turned @ v.T + THRESHOLD * (new + noise)


def best(call: Callable[[], list], repeats: int) -> tuple[float, list]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return min(seconds), result


def report(name: str, matrices: list[Tensor], near: list[Tensor | None], repeats: int, round_time: float) -> None:
    slow, expected = best(lambda: plain(matrices), repeats)
    fast, factors = best(lambda: threshold_singular_values(matrices, THRESHOLD, near), repeats)
    dense, factored = best(lambda: [f.left @ f.right for f in factors], repeats)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(factored, expected, strict=True) if b.any())
    kept = sum(min(f.left.numel() + f.right.numel(), m.numel()) for f, m in zip(factors, matrices, strict=True))
    print(
        f"{name:28} {kept / 1e6:8.2f} {slow:8.2f} {fast + dense:8.2f} {slow / (fast + dense):7.1f} {worst:11.0e} "
        f"{(fast + dense) / (round_time + fast + dense):9.2%}",
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
    print(f"{'':28} {'million':>8} {'plain,':>8} {'here,':>8} {'':>7} {'relative':>11} {'share of':>9}")
    print(f"{'':28} {'params':>8} {'s':>8} {'s':>8} {'faster':>7} {'difference':>11} {'a round':>9}")
    seconds, _ = best(lambda: [training_step(network)], arguments.repeats)
    round_time = 10 * 75 * seconds
    report("round 1", matrices, [None] * len(matrices), arguments.repeats, round_time)
    for kind in (as_in_a_run, crowded):
        print(kind.__name__.replace("_", " "))
        for millions in LATER:
            rounds = [kind(m, millions / 11.17) for m in matrices]
            near = [before.right for before, _ in rounds]
            report(f"  about {millions} million", [later for _, later in rounds], near, arguments.repeats, round_time)


if __name__ == "__main__":
    main()
