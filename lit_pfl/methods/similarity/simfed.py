"""SimFed: similarity matching and kernel factorization."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.batches import tensors_in
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import mean_loss
from lit_pfl.nn import Memory
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops import cosine_similarity_matrix, least_similar, most_similar, random_others, softmax_over
from lit_pfl_callbacks.random_state import torch_state_kept

Match = Literal["best", "random", "worst"]
CRITERIA, EMBEDDING = "criteria_input", "embedding"


class SimFed(Client):
    """Clients exchange factors with those clients whose encoders see the same input in a similar way.

    The server draws one image of Gaussian noise, the criteria input, and sends it once. A client uploads its factors
    together with what its encoder makes of that image. The server compares these embeddings by their cosine, and
    replies to every client with the softmax-weighted mixture of the factors of all clients that are similar enough.

    The paper's Eq. 8 has the weight outside of the sum; here it is inside, which makes a weighted mean. Its Algorithm 1
    mixes u, v and mu; here biases and norms are mixed with them. Noise takes the place of a batch's floating-point
    tensors; whole numbers next to them, such as categories or lengths, stay those of each client's own first sample.

    Args:
        tau: smallest cosine similarity of two clients that exchange anything.
        alpha: scale of the similarities in the softmax.
        match: with whom a client exchanges: ``best``, those that are similar enough; or, as controls and weighted
            equally, itself and two others, drawn at ``random`` every round or the ``worst`` matches (Table 3).
        factorization: how weights are factorized; None matches dense models (the ablation "Similarity Matching"). The
            paper does not say how u, v and mu start. By default they make the dense network's own first weights: from
            weights of rank 1, clients learn more slowly than without a factorization.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for a learner without an encoder or an example of its input, and when the clients' embeddings
            differ in size.

    Source:
        SimFed, Eq. 1 to 8 and Algorithm 1.
    """

    shares = EVERYTHING
    reserved = (CRITERIA, f"{CRITERIA}.", EMBEDDING)

    criteria_input: Memory

    def __init__(
        self,
        tau: float = 0.9,
        alpha: float = 30.0,
        match: Match = "best",
        factorization: Factorization | None = Factorization(form="IFxOF", l1=1e-4),
        **kwargs: Any,
    ) -> None:
        super().__init__(factorization=factorization, **kwargs)
        self.tau, self.alpha, self.match = tau, alpha, match

    def configure_state(self) -> None:
        if self.encoder_module is None:
            raise ConfigError(
                "model.encoder: SimFed compares what encoders make of an input; say which part of "
                f"{type(self.learner).__name__} is one (--model.encoder net.encoder), or give it an attribute `body`."
            )
        if self.spec.example is None:
            raise ConfigError(
                f"model.learner: SimFed makes noise in the shape of an input; give {type(self.learner).__name__} an "
                "example_input_array."
            )
        if not self._inputs():
            raise ConfigError(
                f"model.learner: SimFed puts noise in the place of an input's tensors, and a batch of the type "
                f"{type(self.spec.example).__name__} has none that can be replaced; give batches of tensors in tuples, "
                "lists, dicts or dataclasses."
            )
        self.criteria_input = Memory({name: torch.zeros_like(x) for name, x in self._inputs().items()})

    def _inputs(self) -> dict[str, Tensor]:
        """Return those tensors of the example that noise takes the place of, by the names they are sent under."""
        inputs = noisy_tensors(self.spec.example)
        return {CRITERIA if len(inputs) == 1 else f"{CRITERIA}.{i}": x for i, x in enumerate(inputs)}

    def configure_server(self) -> "SimFedServer":
        noise = {name: noise_like(x) for name, x in self._inputs().items()}
        self._check_encoder_gets(noise)
        return SimFedServer(self.tau, self.alpha, noise, self.match, seed=int(torch.randint(2**31, ())))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        noise = {name: reply[name] for name in self.criteria_input if name in reply}
        for name, x in noise.items():
            if x.shape != (own := self.criteria_input[name].shape):
                raise ConfigError(
                    f"model.learner: SimFed sends all clients one input of noise, of shape {list(x.shape)}, and client "
                    f"{self.spec.client_id}'s input has {list(own)}; give clients inputs of one shape, as by padding."
                )
        if noise:
            self.criteria_input.copy_(noise)
        super().download({name: tensor for name, tensor in reply.items() if name not in noise})

    def _check_encoder_gets(self, noise: Mapping[str, Tensor]) -> None:
        """See that noise comes to the encoder: an object that nobody looks into may hold what it embeds."""
        other = {name: noise[name] if x.is_floating_point() else x for name, x in self._inputs().items()}
        try:
            with torch_state_kept():
                zeros, some = self._seen(dict(self.criteria_input.items())), self._seen(other)
        except ConfigError:  # it may lack what it has in training; then it is said of the first upload
            return
        if all(x.any() for x in other.values()) and all(map(torch.equal, zeros.tensors, some.tensors)):
            raise ConfigError(
                f"model.encoder: SimFed puts noise in the place of an input's tensors, and what this part of "
                f"{type(self.learner).__name__} gets has none that can be replaced; give batches of tensors in tuples, "
                "lists, dicts or dataclasses, or name another part."
            )

    def embedding(self) -> Tensor:
        """Return the (d,) embedding of the criteria input, Eq. 2; (2d,) where a step cannot do with one sample."""
        return self._seen(dict(self.criteria_input.items())).embedding.flatten()

    @torch.no_grad()
    def _seen(self, noise: Mapping[str, Tensor]) -> "_Seen":
        drawn = {id(x): noise[name] for name, x in self._inputs().items()}
        batch = apply_to_collection(self.spec.example, Tensor, lambda x: drawn.get(id(x), x).to(self.device))  # type: ignore[union-attr]
        assert self.encoder_module is not None
        handle = self.encoder_module.register_forward_hook(_look, with_kwargs=True)
        try:
            try:
                mean_loss(self.learner, [batch])
            except (ConfigError, _Seen):
                raise
            except Exception:  # steps may mix or pair samples; an input given twice has an embedding of one direction
                mean_loss(self.learner, [apply_to_collection(batch, Tensor, lambda x: torch.cat([x, x]))])
        except _Seen as seen:
            return seen
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"model.encoder: {type(self.learner).__name__} cannot take the Gaussian noise by which SimFed compares "
                f"encoders ({type(error).__name__}: {error}); name a part that can."
            ) from error
        finally:
            handle.remove()
        raise ConfigError(
            f"model.encoder: training_step of {type(self.learner).__name__} does not call this part, or gets no "
            "tensor from it; name another."
        )

    def upload(self) -> Payload:
        """Return the factors and the embedding of the criteria input."""
        return super().upload().with_({EMBEDDING: self.embedding()})


class _Seen(Exception):
    """An encoder has embedded the criteria input: what a training step does with that is not looked at, nor its loss,
    which noise need not have.

    Args:
        embedding: what it returned.
        given: what it was called with.
    """

    def __init__(self, embedding: Tensor, given: Any) -> None:
        self.embedding, self.tensors = embedding, [*tensors_in(given), embedding]


def _look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    first = next((x for x in tensors_in(output) if x.is_floating_point()), None)
    if first is not None:
        raise _Seen(first, (args, kwargs))


def noisy_tensors(example: Any) -> list[Tensor]:
    """Return those tensors of a batch that Gaussian noise can stand for; without any, those of whole numbers."""
    tensors = [x for x in tensors_in(example) if x.dim()]
    return [x for x in tensors if x.is_floating_point()] or tensors


def noise_like(x: Tensor) -> Tensor:
    """Return Gaussian noise in the shape of a tensor; for whole numbers, any from 0 to the largest."""
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, int(x.max()) + 1)


class SimFedServer(MixingServer):
    """Mixes what clients share by the similarity of their embeddings.

    Args:
        tau: see :class:`SimFed`.
        alpha: see :class:`SimFed`.
        criteria_input: tensors of noise sent to every client once, by name; (1, C, H, W) for images.
        match: see :class:`SimFed`.
        seed: of random matches.
    """

    def __init__(
        self, tau: float, alpha: float, criteria_input: Mapping[str, Tensor], match: Match = "best", seed: int = 0
    ) -> None:
        self.tau, self.alpha, self.criteria_input = tau, alpha, criteria_input
        self.match, self.seed = match, seed

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        similarity = cosine_similarity_matrix(torch.stack([upload[EMBEDDING] for upload in latest.values()]))
        if self.match == "best":
            return softmax_over(most_similar(similarity, self.tau), similarity, self.alpha)
        if self.match == "worst":
            return softmax_over(least_similar(similarity, others=2), similarity, scale=0.0)
        rng = np.random.default_rng([self.seed, round])
        return softmax_over(random_others(similarity, 2, rng), similarity, scale=0.0)

    def is_averaged(self, name: str) -> bool:
        return name != EMBEDDING

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        sizes = {client: info.initial[EMBEDDING].numel() for client, info in sorted(clients.items())}
        first = next(iter(sizes))
        for client, size in sizes.items():
            if size != sizes[first]:
                raise ConfigError(
                    f"model.encoder: client {client}'s embedding has {size} numbers and client {first}'s "
                    f"{sizes[first]}, so they cannot be compared; name a part of the network whose output has the "
                    "same shape whatever the input, such as one behind the pooling, and give inputs of one shape."
                )
        super().start(clients)
        self.model = self.model.with_(self.criteria_input)
