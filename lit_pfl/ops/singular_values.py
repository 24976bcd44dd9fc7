"""Soft thresholding of singular values, fast for many matrices, and faster where few values stay."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: about the largest error that the shorter ways may add, as a share of the matrix (Frobenius norms)
TOLERANCE = 6e-6
#: within which shares of the threshold lies what singular values outside a subspace are taken to stay below
LOWEST, HIGHEST = 0.4, 0.8
#: how wide a subspace is worth while, as a share of the shorter side
WIDEST = 0.5
#: from which ratio of its sides on a matrix is decomposed by way of ``A^T A``, in twice the precision
OBLONG = 1.5
#: how often the subspace is looked at before the whole matrix is decomposed instead
STEPS = 5
#: by how many random directions a subspace is wider than what is known of it
MORE = 24
#: how many random combinations of vectors tell how large a sum over all of them is
SAMPLES = 16


class Factors(NamedTuple):
    """A matrix of rank r as ``left @ right``, with the square roots of its singular values on either side.

    Args:
        left: (m, r), columns orthogonal to each other.
        right: (r, n), rows orthogonal to each other.
    """

    left: Tensor
    right: Tensor


def threshold_singular_values(
    matrices: Sequence[Tensor], threshold: float, near: Sequence[Tensor | None] | None = None
) -> list[Factors]:
    """Shrink the singular values of matrices: ``U max(S - threshold, 0) V^T``, in factors.

    This is the proximal operator of ``threshold * ||A||_*``. Three ways lead there, the first one that is good enough:

    * Where it is known about where to look (``near``) and few singular values exceed the threshold, a subspace is
      iterated towards theirs. It is taken once what it leaves out is seen to be below the threshold, and nearly
      orthogonal to what it holds.
    * Of an oblong matrix the eigenvectors of ``A^T A`` in double precision. Its rounding errors, about
      ``n eps ||A||^2``, move the result by that divided by the threshold: far below single precision, unless the
      threshold is tiny compared with the matrix.
    * The singular value decomposition.

    Matrices of one shape are decomposed as one batch. Nothing is drawn from random generators.

    Args:
        matrices: any number of (m, n) real tensors; types shorter than float32 are computed in float32.
        threshold: what is taken from every singular value, 0 or more.
        near: for every matrix a tensor (r, n) whose rows span about the row space of the result, such as ``right`` of
            the result for a similar matrix; or None.

    Returns:
        For every matrix its factors in its own type; r is the number of singular values above the threshold, 0 for a
        matrix of zeros.

    Raises:
        ValueError: for a negative threshold, for a matrix that holds NaN or infinity, and where ``near`` does not fit.

    Source:
        Cai, Candes and Shen 2010, Theorem 2.1; FedSLR, Appendix A.1.
    """
    if not threshold >= 0:
        raise ValueError(f"Singular values cannot be shrunk by {threshold}; give 0 or more.")
    near = [None] * len(matrices) if near is None else near
    if len(near) != len(matrices):
        raise ValueError(f"near has {len(near)} entries for {len(matrices)} matrices; give one, or None, for each.")
    results: dict[int, Factors] = {}
    by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, matrix in enumerate(matrices):
        if matrix.dim() != 2 or not matrix.is_floating_point():
            raise ValueError(f"Tensor {i} is {matrix.dtype} {tuple(matrix.shape)}, not a matrix of real numbers.")
        if (start := near[i]) is not None and start.shape[1:] != matrix.shape[1:]:
            raise ValueError(
                f"near[{i}] is {tuple(start.shape)}; for matrix {tuple(matrix.shape)} give {matrix.shape[1]} columns."
            )
        by_shape.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    for alike in by_shape.values():
        rest = []
        for i in alike:
            matrix = matrices[i].detach()
            matrix = matrix.float() if matrix.dtype.itemsize < 4 else matrix
            # so that nothing overflows, and a matrix of zeros is one
            scale = max(abs(float(extreme)) for extreme in matrix.aminmax()) if matrix.numel() else 0.0
            if not math.isfinite(scale):
                raise ValueError("A matrix holds NaN or infinity; it has no singular values.")
            if scale == 0:
                results[i] = Factors(matrix[:, :0], matrix[:0])
                continue
            matrix = matrix / scale
            start = near[i]
            found = None if start is None else _in_a_subspace(matrix, threshold / scale, start.to(matrix) / scale**0.5)
            if found is None:
                rest.append((i, matrix, threshold / scale, scale))
            else:
                results[i] = _scaled(found, scale)
        if rest:
            everything = _of_all(torch.stack([matrix for _, matrix, _, _ in rest]), [t for _, _, t, _ in rest])
            results |= {i: _scaled(f, scale) for (i, _, _, scale), f in zip(rest, everything, strict=True)}
    return [Factors(*(f.to(matrices[i].dtype) for f in results[i])) for i in range(len(matrices))]


def _scaled(factors: Factors, scale: float) -> Factors:
    return Factors(*(factor * scale**0.5 for factor in factors))


def _of_all(stack: Tensor, thresholds: list[float]) -> list[Factors]:
    """Decompose (B, m, n) matrices whose largest entry is 1."""
    if stack.shape[1] < stack.shape[2]:
        return [Factors(f.right.T, f.left.T) for f in _of_all(stack.mT, thresholds)]
    eps, sizes = torch.finfo(torch.float64).eps, torch.linalg.matrix_norm(stack)
    worst = stack.shape[2] * eps * float((sizes / torch.tensor(thresholds).to(sizes)).max())
    square = stack.shape[1] < OBLONG * stack.shape[2]
    if square or worst > TOLERANCE or stack.dtype == torch.float64:
        u, s, vt = torch.linalg.svd(stack, full_matrices=False)
        return [_shrunk(*parts) for parts in zip(u, s, vt.mT, thresholds, strict=True)]
    wide = stack.double()
    squares, vectors = torch.linalg.eigh(wide.mT @ wide)
    values = squares.clamp(min=0).sqrt()
    result = []
    for matrix, s, v, threshold in zip(stack, values, vectors.to(stack.dtype), thresholds, strict=True):
        kept = s > threshold
        root = (s[kept] - threshold).sqrt()
        # (A v) / s is u, of which only what the small s leaves of rounding errors counts
        left = (matrix @ v[:, kept]) * (root / s[kept]).to(matrix.dtype)
        result.append(Factors(left.flip(1), (v[:, kept] * root.to(matrix.dtype)).T.flip(0)))
    return result


def _shrunk(u: Tensor, s: Tensor, v: Tensor, threshold: float) -> Factors:
    kept = s > threshold
    root = (s[kept] - threshold).sqrt()
    return Factors(u[:, kept] * root, (v[:, kept] * root).T)


def _in_a_subspace(matrix: Tensor, threshold: float, near: Tensor) -> Factors | None:
    """Look in a subspace about the rows of (r, n) ``near``; None if that would take long or does not lead far enough.

    The subspace is somewhat wider, in random directions, the more so the more of ``near`` has singular values, the
    squares of its rows' norms, that are small compared with the threshold: as many may be just below it. It is widened
    where it is seen to be too narrow. It is multiplied by A and A^T in turns, random directions twice more than the
    others, and made orthonormal: the largest values would soon swamp all else.

    Here vectors are rows, which is faster: ``q`` is Q^T, ``right`` V^T and ``images`` (A V)^T.
    """
    widest = WIDEST * min(matrix.shape)
    extra = MORE + 2 * int((near.square().sum(1) < threshold / 2).sum())
    if matrix.dtype != torch.float32 or threshold <= 0 or len(near) + extra > widest:
        return None
    generator = torch.Generator().manual_seed(0)
    enough = TOLERANCE * float(matrix.norm())
    images = torch.nn.functional.normalize(near) @ matrix.T
    errors: list[float] = []
    for steps_left in reversed(range(STEPS)):
        q = _nearly_orthonormal(images)
        if extra:
            around = torch.randn(extra, matrix.shape[1], generator=generator).to(matrix) @ matrix.T
            turned = _orthonormal_to(q, around, times=1)
            q = torch.cat([q, _orthonormal_to(q, turned @ matrix @ matrix.T)])
        z = q @ matrix
        squares, w = (t.flip(-1) for t in torch.linalg.eigh(_lower_products(z.double())))
        s = squares.clamp(min=float(squares[0]) * 1e-14).sqrt()
        right = (w / s).to(matrix.dtype).T @ z
        outside = min(max(1.25 * float(s[-1]), LOWEST * threshold), HIGHEST * threshold)
        count = int((s > outside).sum())
        extra = 0 if count < len(s) else count
        if len(s) + extra > widest:
            return None
        images = right[:count] @ matrix.T
        if not extra:
            lengths = images.norm(dim=1).double()
            inside = (w * s)[:, :count].T.to(matrix.dtype)
            errors.append(_error(images, lengths, inside, q, s[:count], outside, threshold))
            if errors[-1] <= enough:
                # the second look takes longer and bears that some of what is outside is larger than usual
                looks = (outside, HIGHEST * threshold)
                if not any(_all_below(matrix, images, right[:count], usual, threshold) for usual in looks):
                    return None
                kept = lengths > threshold
                root = (lengths[kept] - threshold).sqrt()[:, None]
                left = images[kept].mul_((root / lengths[kept][:, None]).to(matrix.dtype))
                return Factors(left.T, right[:count][kept].mul_(root.to(matrix.dtype)))
            if len(errors) > 1 and errors[-1] * (errors[-1] / errors[-2]) ** steps_left > enough:
                return None
        images = torch.cat([images, right[count:] @ matrix.T])
    return None


def _error(
    images: Tensor, lengths: Tensor, inside: Tensor, q: Tensor, s: Tensor, outside: float, threshold: float
) -> float:
    """Return about how far ``A V V^T``, its singular values shrunk, is from A with its own shrunk.

    With orthonormal Q, ``Q^T A = W S V^T`` and the rest ``R = A - Q Q^T A``, A V has of every s a part ``R v`` outside
    Q, which is seen; what A^T then finds outside V is at most o / s of that, with o the largest singular value of what
    is outside, and is not waited for. The error of taking ``A V V^T`` for A is, to first order,
    ``(s - t) sqrt(s^2 + o^2) / (s^2 - o^2)`` times that of every kept s, with t the threshold; to second order it is
    added the square of ``R v`` over ``s - o``. Of what is not kept, where ``|A v|`` is below the threshold, it is what
    that and the part outside V together, as the root of the sum of squares, exceed the threshold by.

    Args:
        images: (A V)^T, (l, m).
        lengths: of its rows, (l,).
        inside: (W S)^T, (l, k): what Q holds of them.
        q: Q^T, (k, m).
        s: (l,), all larger than ``outside``.
        outside: o.
        threshold: t.
    """
    kept = lengths > threshold
    further = outside / s
    weights = further * (s - threshold) * (s**2 + outside**2).sqrt() / (s**2 - outside**2), (s - outside).rsqrt()
    # sums of |R v|^2 over many v by some random combinations of them, which costs less than each by itself
    mixed = torch.randn(2, SAMPLES, len(s), generator=torch.Generator().manual_seed(2)).to(s)
    combinations = torch.cat([*(mixed * torch.stack(weights)[:, None] * kept), torch.eye(len(s)).to(s)[~kept]]).to(q)
    apart = torch.addmm(combinations @ images, combinations @ inside, q, alpha=-1).norm(dim=1).double()
    first, second = apart[:SAMPLES].square().mean().sqrt(), apart[SAMPLES : 2 * SAMPLES].square().mean()
    lifted = (lengths[~kept].square() + (further[~kept] * apart[2 * SAMPLES :]).square()).sqrt() - threshold
    return float(first + second + lifted.clamp(min=0).sum())


def _lower_products(rows: Tensor) -> Tensor:
    """Return the products of (l, n) rows with each other, (l, l), as far as they are on or below the diagonal."""
    result = rows.new_zeros(len(rows), len(rows))
    step = max(1, -(-len(rows) // 4))
    for i in range(0, len(rows), step):
        torch.mm(rows[i : i + step], rows[: i + step].T, out=result[i : i + step, : i + step])
    return result


def _orthonormal(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of (l, n) rows."""
    return torch.linalg.qr(rows.T).Q.T


def _nearly_orthonormal(rows: Tensor) -> Tensor:
    """Return one of rows that mostly are nearly orthogonal, to about 1e-5 where they are: faster by a third."""
    rows = torch.nn.functional.normalize(rows)
    factor, failed = torch.linalg.cholesky_ex(_lower_products(rows))
    # its diagonal has how far every row is from the span of those before it
    if failed or (factor.diagonal() < 0.3).any():
        return _orthonormal(rows)
    return torch.linalg.solve_triangular(factor, rows, upper=False)


def _orthonormal_to(others: Tensor, rows: Tensor, times: int = 2) -> Tensor:
    """Return one of what (l, n) rows have that is not in the (k, n) orthonormal others."""
    for _ in range(times):  # what rounding leaves of a large part is gone after the second time
        rows = _orthonormal(rows - (rows @ others.T) @ others)
    return rows


def _all_below(matrix: Tensor, left: Tensor, right: Tensor, usual: float, threshold: float) -> bool:
    """See whether ``matrix - left^T @ right``, with singular values mostly up to ``usual``, has none above a threshold.

    A Chebyshev polynomial stays within 1 up to ``usual`` and is far above that from the threshold on; its degree is
    such that 3 % of what it is there exceeds three times the length of a random vector, sqrt(n). Of a matrix with a
    singular value there, it makes at least one of eight random vectors longer than those 3 %: that none has 3 % of its
    standard deviation in a given direction happens once in 10^13.
    """
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(8, matrix.shape[1], generator=generator).to(matrix)
    edge = 2 * (threshold / usual) ** 2 - 1

    def step(x: Tensor) -> Tensor:
        y = x @ matrix.T - (x @ right.T) @ left
        back = y @ matrix - (y @ left.T) @ right
        return 2 / usual**2 * back - x

    now, at_edge, most = step(before), [1.0, edge], 3 * matrix.shape[1] ** 0.5
    while 0.03 * at_edge[-1] < most:
        before, now = now, 2 * step(now) - before
        at_edge.append(2 * edge * at_edge[-1] - at_edge[-2])
    return float(now.norm(dim=1).max()) < most
