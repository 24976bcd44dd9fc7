"""pFedFDA: a common body, and each client's head made from Gaussians of the classes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import PositiveFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import BODY
from lit_pfl.nn import Memory

MEANS, COVARIANCE = "class_means", "covariance"
#: classes with more samples than this have a mean of their own, and folds of the cross-validation have one each
FEWEST = 2


class PFedFDA(Classifying):
    """The head is the Bayes classifier of Gaussian classes; clients mix their own Gaussians with the common ones.

    Classes have means mu_c and one covariance S. The head's logits are ``z_c = h^T S^-1 mu_c - mu_c^T S^-1 mu_c / 2 +
    log p_c``, with p the client's class shares plus ``eps``; S is shrunk, ``(1 - eps) S + eps tr(S) / d I``. A client
    trains the body alone, under the head of the received mu and S. Then it takes the class means m_c of its features,
    those received for classes with at most two samples, and ``V = sum (h - m_y)(h - m_y)^T / (n - 1) + eps + I``, and
    sends the body and ``mu = b m + (1 - b) mu``, ``S = b' V + (1 - b') S``. The server averages all by samples. b and
    b' minimize the cross entropy in a cross-validation with two folds of each class, by L-BFGS from 0.5; they are 0
    where no class has two samples. What is evaluated has the head of mu and S mixed again for its body.

    Before round 1, mu is drawn from [0, 1) and S the identity. Features are those of all training data in evaluation
    mode; the authors' code takes them from training, and from evaluation mode where it evaluates. The learner's own
    head does not train.

    Args:
        single_beta: whether b' is b.
        eps: added to class shares and covariances, and the share by which these are shrunk.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module, or the data no class
            labels.

    Source:
        Mclaughlin and Su 2024, with the details of the authors' code.
    """

    needs_automatic = "trains the body under a head that is not trained"
    needs_labels = "takes the mean features of every class"
    needs_common_labels = "averages means of classes"

    shares = BODY
    reserved = (MEANS, COVARIANCE)

    common: Memory
    own: Memory

    def __init__(self, single_beta: bool = False, eps: PositiveFloat = 1e-4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.single_beta, self.eps = single_beta, eps
        self._head: Discriminant | None = None

    def configure_state(self) -> None:
        d = self.num_features
        first = {MEANS: torch.zeros(self.num_logits, d), COVARIANCE: torch.eye(d)}
        self.common, self.own = Memory(first), Memory(first)

    def configure_server(self) -> "PFedFDAServer":
        return PFedFDAServer(seed=int(torch.randint(2**31, ())))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self.common.copy_(reply)
        super().download({name: x for name, x in reply.items() if name not in (MEANS, COVARIANCE)})

    def upload(self) -> Payload:
        """Return the body, and the mixed means and covariance."""
        return super().upload().with_(dict(self.own.items()))

    @property
    def priors(self) -> Tensor:
        """(C,) shares of the classes among the client's training samples, none of which is 0."""
        shares = self.class_counts.double() / self.class_counts.sum() + self.eps
        return (shares / shares.sum()).to(self.device)

    def begin_round(self) -> None:
        self._head = self._classifier(self.common[MEANS].double(), self.common[COVARIANCE].double())

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head(logits=self._head):
            return super().objective(batch, batch_idx)

    def end_round(self) -> None:
        self._head = None
        means, covariance = self._adapted()
        self.own.copy_({MEANS: means, COVARIANCE: covariance})

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Put the head of the client's mixed Gaussians in the place of the learner's."""
        with self.at_head(logits=self._classifier(*self._adapted())):
            yield self.learner

    def _classifier(self, means: Tensor, covariance: Tensor) -> "Discriminant":
        return Discriminant(*discriminant(means, covariance, self.priors, self.eps))

    def _adapted(self) -> tuple[Tensor, Tensor]:
        """Return the client's mixed means, (C, d), and covariance, (d, d), for the body as it is."""
        features, labels = self.all_embedded()
        with torch.inference_mode(False), torch.enable_grad():
            features, labels = features.clone().double(), labels.clone()
            means, covariance = self.common[MEANS].double(), self.common[COVARIANCE].double()
            folds = two_folds(labels, seed=self.spec.client_id)
            betas = best_betas(features, labels, folds, (means, covariance), self.priors, self.eps, self.single_beta)
            own_means, own_covariance = gaussians(features, labels, means, self.eps)
            mixed = mix(betas, (own_means, own_covariance), (means, covariance))
        return mixed[0].detach(), mixed[1].detach()


class PFedFDAServer(Server):
    """Averages bodies and Gaussians.

    Args:
        seed: of the first means.
    """

    one_model = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        means = self.model[MEANS]
        drawn = torch.rand(means.shape, generator=torch.Generator().manual_seed(self.seed))
        self.model = self.model.with_({MEANS: drawn.to(means)})


class Discriminant(nn.Module):
    """A linear head in the place of another's logits.

    Args:
        weight: (C, d).
        bias: (C,).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float())
        self.register_buffer("bias", bias.detach().float())

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return (B, C) logits of (B, d) features."""
        return nn.functional.linear(features.to(self.weight.dtype), self.weight, self.bias).to(logits.dtype)


def discriminant(means: Tensor, covariance: Tensor, priors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the weight, (C, d), and bias, (C,), of the Bayes classifier of Gaussian classes.

    Args:
        means: (C, d).
        covariance: (d, d), of all classes.
        priors: (C,) shares of the classes.
        eps: how far the covariance is shrunk towards a multiple of the identity.
    """
    d = len(covariance)
    shrunk = (1 - eps) * covariance + eps * covariance.trace() / d * torch.eye(d).to(covariance)
    weight = torch.linalg.solve(shrunk, means.T).T
    return weight, priors.log() - (means * weight).sum(1) / 2


def gaussians(features: Tensor, labels: Tensor, common: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return class means, (C, d), and a covariance, (d, d), of features, as :class:`PFedFDA` takes them.

    Args:
        features: (n, d).
        labels: (n,).
        common: (C, d) means of classes that have too few samples.
        eps: added to every entry of the covariance.
    """
    classes, d = common.shape
    counts = torch.bincount(labels, minlength=classes)
    sums = torch.zeros_like(common).index_add_(0, labels, features)
    means = torch.where((counts > FEWEST)[:, None], sums / counts.clamp_min(1)[:, None], common)
    away = features - means[labels]
    return means, away.T @ away / max(1, len(labels) - 1) + eps + torch.eye(d).to(features)


def mix(betas: Tensor, own: tuple[Tensor, Tensor], common: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return means and covariance, each the client's by its share and the common one by the rest.

    Args:
        betas: (2,) or (1,), cut to 0 to 1: of the means, and of the covariance.
        own: (C, d) and (d, d).
        common: alike.
    """
    b = betas.clamp(0, 1)
    return b[0] * own[0] + (1 - b[0]) * common[0], b[-1] * own[1] + (1 - b[-1]) * common[1]


def two_folds(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return positions of samples in two folds, in each of which is half of every class that has two samples or more.

    Args:
        labels: (n,).
        seed: of who is in which.
    """
    generator, folds = torch.Generator().manual_seed(seed), ([], [])  # type: ignore[var-annotated]
    for c in labels.unique().tolist():
        places = (labels.cpu() == c).nonzero()[:, 0]
        if len(places) >= FEWEST:
            places = places[torch.randperm(len(places), generator=generator)]
            for fold, part in zip(folds, (places[::2], places[1::2]), strict=True):
                fold.append(part)
    empty = torch.empty(0, dtype=torch.int64)
    first, second = (torch.cat([empty, *fold]).to(labels.device) for fold in folds)
    return first, second


def best_betas(
    features: Tensor,
    labels: Tensor,
    folds: tuple[Tensor, Tensor],
    common: tuple[Tensor, Tensor],
    priors: Tensor,
    eps: float,
    single: bool,
) -> Tensor:
    """Return the (2,) shares of a client's own Gaussians, (1,) if it is one share, with the least loss on the folds.

    Args:
        features: (n, d).
        labels: (n,).
        folds: positions of samples; Gaussians of each are scored by the other.
        common: means and covariance that are mixed with the client's.
        priors: (C,) shares of the classes.
        eps: see :class:`PFedFDA`.
        single: whether there is one share.
    """
    size = 1 if single else 2
    if not len(folds[0]) or not len(folds[1]):
        return features.new_zeros(size)
    own = [gaussians(features[fold], labels[fold], common[0], eps) for fold in folds]
    scored = folds[::-1]
    betas = torch.full((size,), 0.5, dtype=features.dtype, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([betas], max_iter=10, tolerance_grad=1e-3, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for gaussian, fold in zip(own, scored, strict=True):
            weight, bias = discriminant(*mix(betas, gaussian, common), priors, eps)
            losses.append(nn.functional.cross_entropy(features[fold] @ weight.T + bias, labels[fold]))
        total = torch.stack(losses).sum()
        total.backward()
        return total

    optimizer.step(loss)
    return betas.detach().nan_to_num(nan=0.5).clamp(0, 1)
