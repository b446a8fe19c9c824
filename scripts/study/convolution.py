"""Two convolutional nets with batch norm, and one of dense layers, on drawn digits under fresh noise: the loss keeps falling."""

import torch
import torch.nn.functional as F
from torch import nn

from . import glyphs
from .training import Run, generator_of


def layer(inside, outside, stride):
    return [nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]


def convolutional():
    """Some 0.25 million parameters; strides keep an iteration short."""
    return nn.Sequential(*layer(1, 16, 2), *layer(16, 32, 2), *layer(32, 64, 1), *layer(64, 128, 2), nn.Flatten(), nn.Linear(128 * 16, 64),
                         nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def pooled():
    """Some 0.2 million parameters, all but a thousand of them in convolutions: the last layer sees means over the image."""
    return nn.Sequential(*layer(1, 24, 2), *layer(24, 48, 2), *layer(48, 96, 2), *layer(96, 160, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10))


def dense():
    """Some 0.27 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(glyphs.SIZE**2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


MODELS = {"convolutional": convolutional, "pooled": pooled, "dense": dense}


class Noisy(Run):
    """SGD with momentum. The noise on the images is drawn anew for each batch, and is fixed on the held-out set."""

    def __init__(self, seed, model="convolutional", rate=0.02, batch=32, noise=1.5, decay=5e-4, held=2000):
        super().__init__(seed)
        self.size, self.noise = batch, noise
        self.images, self.labels, images, labels = glyphs.data()
        generator = torch.Generator().manual_seed(glyphs.SEED + 1)
        self.held_images = images[:held] + noise * torch.randn(images[:held].shape, generator=generator)
        self.held_labels = labels[:held]
        self.model = MODELS[model]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)

    def loss(self, n):
        generator = generator_of(self.seed, n)
        chosen = torch.randint(len(self.labels), (self.size,), generator=generator)
        images = self.images[chosen]
        return F.cross_entropy(self.model(images + self.noise * torch.randn(images.shape, generator=generator)), self.labels[chosen])

    def evaluate(self):
        logits = torch.cat([self.model(images) for images in self.held_images.split(250)])
        right = (logits.argmax(1) == self.held_labels).float().mean().item()
        return F.cross_entropy(logits, self.held_labels).item(), {"accuracy": right}
