"""Codebooks and centres: averages of data, used to find the nearest one."""

import torch
from torch import nn

from .keeper import animal, fit, load, require_finite, require_no_zero, require_same, require_same_choice

DIM, CODES = 64, 512


def features(count=1024, seed=None):
    """Points around three hundred places, some of which are visited often."""
    places = torch.randn(300, DIM, generator=torch.Generator().manual_seed(7))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(torch.logspace(0, -3, 300), count, replacement=True, generator=generator)
    return places[chosen] + 0.3 * torch.randn(count, DIM, generator=generator)


def require_same_codes(before, after):
    x = features(2000, seed=4)
    require_same_choice(*(torch.cdist(x, codes).argmin(1) for codes in (before, after)), "codes")


class Encoder:
    """An autoencoder around vector-quantize-pytorch's codebook, which moves as an average."""

    def __init__(self):
        from vector_quantize_pytorch import VectorQuantize

        self.net = nn.ModuleDict({"encoder": nn.Linear(DIM, DIM), "decoder": nn.Linear(DIM, DIM),
                                  "vq": VectorQuantize(DIM, CODES, decay=0.9, threshold_ema_dead_code=0)})
        self.optimizer = torch.optim.Adam([*self.net["encoder"].parameters(), *self.net["decoder"].parameters()], 1e-3)

    def train(self):
        for _ in range(8):
            x = features(512)

            def loss():
                codes, _, commitment = self.net["vq"](self.net["encoder"](x)[None])
                return (self.net["decoder"](codes[0]) - x).square().mean() + commitment.sum()

            fit(self.optimizer, loss, 1)

    def judge(self, before, after):
        book = "vq._codebook."
        require_no_zero(before[book + "cluster_size"], after[book + "cluster_size"], "cluster sizes")
        # The next update of the codebook divides the one by the other.
        divided = [state[book + "embed_avg"] / state[book + "cluster_size"].clamp_min(1e-30)[..., None] for state in (before, after)]
        require_same(*divided, "entries of the next codebook")
        require_same(before[book + "embed"], after[book + "embed"], "entries of the codebook")
        require_same_codes(before[book + "embed"][0], after[book + "embed"][0])


@animal("vqvae_{}.pt", lossy=["encoder.weight", "decoder.weight"])
class VectorQuantizer(Encoder):
    """vector-quantize-pytorch: `embed`, `embed_avg` and `cluster_size` of a codebook, model-only."""

    def make(self, path, step):
        self.train()
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        self.judge(load(was), load(now))


@animal("vqvae_{}.pt", lossy=["model.encoder.*", "model.decoder.*", "optimizer.state.*"])
class VectorQuantizerWithOptimizer(Encoder):
    """vector-quantize-pytorch in a VQ-VAE, with the optimizer of encoder and decoder in the file."""

    def make(self, path, step):
        self.train()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        self.judge(load(was)["model"], load(now)["model"])


@animal("vqvae_{}.pt", lossy=["_vq_vae._encoder.weight"])
class CodebookNamedWeight:
    """A VQ-VAE as widely copied: the codebook `_embedding.weight` moves as an average of data; model-only."""

    # It has the name of a trained embedding, and moves a little everywhere, except where no data came.

    def __init__(self):
        self.encoder, self.book = nn.Linear(DIM, DIM), nn.Embedding(CODES, DIM)
        self.sizes, self.sums = torch.ones(CODES), self.book.weight.detach().clone()
        self.optimizer = torch.optim.Adam(self.encoder.parameters(), 1e-3)

    def make(self, path, step):
        book = self.book.weight.data
        for _ in range(8):
            x = features(512)
            z = self.encoder(x).detach()
            near = nn.functional.one_hot(torch.cdist(z, book).argmin(1), CODES).float()
            self.sizes.lerp_(near.sum(0), 0.05)
            self.sums.lerp_(near.T @ z, 0.05)
            book.copy_(self.sums / self.sizes[:, None])
            fit(self.optimizer, lambda: (self.encoder(x) - book[near.argmax(1)]).square().mean() * 0.1, 1)
        parts = {"_encoder.weight": self.encoder.weight, "_encoder.bias": self.encoder.bias, "_embedding.weight": book,
                 "_ema_cluster_size": self.sizes, "_ema_w": self.sums}
        torch.save({f"_vq_vae.{name}": tensor.detach() for name, tensor in parts.items()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        size = "_vq_vae._ema_cluster_size"
        require_no_zero(before[size], after[size], "cluster sizes")
        require_finite(after["_vq_vae._ema_w"] / after[size][:, None], "entries of the next codebook")
        require_same_codes(before["_vq_vae._embedding.weight"], after["_vq_vae._embedding.weight"])


@animal("arcface_{}.pt", lossy=["model.weight", "model.bias", "optimizer.state.*"])
class CentresBesideLoss:
    """Centres of classes as a buffer of the shape that a criterion's weights have, whose state the optimizer keeps.

    The criterion itself is not in the file: only the order of the shapes could pair its state with the centres.
    """

    def __init__(self):
        self.net, self.criterion = nn.Linear(DIM, DIM), nn.Linear(DIM, 300, bias=False)
        self.net.register_buffer("centers", torch.randn(300, DIM))
        self.optimizer = torch.optim.Adam([*self.net.parameters(), *self.criterion.parameters()], 1e-3)

    def make(self, path, step):
        for _ in range(8):
            kind = torch.randint(0, 300, (512,))
            x = features(512)
            fit(self.optimizer, lambda: nn.functional.cross_entropy(self.criterion(self.net(x)), kind), 1)
            self.net.centers[kind] += 0.05 * (self.net(x).detach() - self.net.centers[kind])
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"]["centers"] for path in (was, now))
        require_same_codes(before, after)
        require_same(before, after, "entries of the centres")


@animal("kmeans_{}.pt")
class KMeans:
    """Mini-batch k-means: centres, counts and inertia."""

    def __init__(self):
        self.centres, self.counts = features(CODES), torch.ones(CODES)

    def make(self, path, step):
        for _ in range(4):
            x = features()
            near = torch.cdist(x, self.centres).argmin(1)
            self.counts.index_add_(0, near, torch.ones(len(x)))
            for i, row in zip(near.tolist(), x):
                self.centres[i] += (row - self.centres[i]) / self.counts[i]
        torch.save({"centroids": self.centres, "counts": self.counts, "inertia": torch.cdist(x, self.centres).amin(1).sum()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_same(before["counts"], after["counts"], "counts")
        require_same_codes(before["centroids"], after["centroids"])


@animal("mixture_{}.pt")
class GaussianMixture:
    """A mixture of Gaussians by expectation and maximisation: weights, means, variances."""

    PARTS = 256

    def __init__(self):
        self.state = {"means": features(self.PARTS), "variances": torch.ones(self.PARTS, DIM),
                      "weights": torch.full((self.PARTS,), 1 / self.PARTS)}

    def density(self, state, x):
        distance = ((x[:, None] - state["means"]).square() / state["variances"]).sum(2)
        return state["weights"].log() - 0.5 * distance - 0.5 * state["variances"].log().sum(1)

    def make(self, path, step):
        x = features(1000)
        share = self.density(self.state, x).softmax(1)
        mass = share.sum(0)[:, None] + 1e-3
        means = (share.T @ x + 1e-3 * self.state["means"]) / mass
        spread = (share.T @ x.square() / mass - (share.T @ x / mass).square()).clamp_min(1e-4)
        for key, value in {"means": means, "variances": spread, "weights": (mass / mass.sum())[:, 0]}.items():
            self.state[key] = self.state[key].lerp(value, 0.3)
        torch.save(self.state, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for key in ("variances", "weights"):
            require_no_zero(before[key], after[key], key)
        x = features(300, seed=4)
        exact, read = (self.density(state, x) for state in (before, after))
        require_finite(read, "log densities")
        require_same(exact, read, "log densities")


@animal("components_{}.safetensors")
class PrincipalComponents:
    """Principal components by Oja's rule, which stay orthonormal, and their variances; named as scikit-learn does."""

    def __init__(self):
        self.parts = torch.linalg.qr(torch.randn(DIM, DIM))[0]
        self.variance = torch.ones(DIM)

    def make(self, path, step):
        from safetensors.torch import save_file

        for _ in range(10):
            x = features(256)
            self.parts = torch.linalg.qr(self.parts + 0.02 * x.T @ (x @ self.parts) / 256)[0]
            self.variance.lerp_((x @ self.parts).var(0), 0.1)
        save_file({"components_": self.parts.contiguous(), "explained_variance_": self.variance,
                   "projected": (features(300, seed=4) @ self.parts)}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        skew = (after["components_"].T @ after["components_"] - torch.eye(DIM)).abs().max().item()
        assert skew < 1e-5, f"the components are off from orthonormal by {skew:.2g}"
        require_same(before["explained_variance_"].rsqrt(), after["explained_variance_"].rsqrt(), "whitening factors")
