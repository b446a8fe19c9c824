"""Images of ten digits, drawn here because data sets may not be at hand: 28 x 28 grey values. As with MNIST, a linear model reads
them with some errors, and a convolutional one with few.

Each image has one of two hands (fonts of 5 x 7 cells) under a random affine map (rotation, shear, both scales, shift) and a
wavy displacement. It has its own stroke width, is blurred, and has noise. The seed is fixed, so every run has the same images.
"""

import functools

import torch
import torch.nn.functional as F

SIZE = 28
TRAINING, HELD_OUT = 12_000, 2_000
SEED = 20_24
STEP = 4  # pixels of the drawing per cell of a font

HANDS = (
    """
    .###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
    #...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
    #...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
    #...# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
    #...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
    .###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
    ""","""
    ..#.. ..#.. ####. ####. #..#. .#### .#... ##### ..##. .####
    .#.#. ..#.. ....# ...#. #..#. .#... .#... ...#. .#..# #...#
    #...# ..#.. ....# ..#.. #..#. .#... #.... ...#. .#..# #...#
    #...# ..#.. ..##. .###. ##### .###. #.##. ..#.. ..##. .####
    #...# ..#.. .#... ....# ...#. ....# ##..# ..#.. .#..# ....#
    .#.#. ..#.. #.... ....# ...#. ....# #...# .#... .#..# ....#
    ..#.. ..#.. ##### ####. ...#. ####. .###. .#... ..##. ....#
    """,
)


def drawings():
    """(hand, digit, height, width): each font smoothed into strokes, values 0 to 1."""
    rows = [[line.split() for line in hand.strip().splitlines()] for hand in HANDS]
    cells = torch.tensor([[[[cell == "#" for cell in line[digit]] for line in hand] for digit in range(10)] for hand in rows])
    cells = F.pad(cells.float(), (2, 2, 1, 1))
    return F.interpolate(cells, scale_factor=STEP, mode="bicubic", align_corners=False).clamp(0, 1)


def warp(count, draw):
    """Grids to sample with: an affine map and a slow wave for each image. `draw(*shape)` gives standard normal numbers."""
    angle, shear = 0.14 * draw(count), 0.15 * draw(count)
    scale = 1.1 * torch.exp(0.09 * draw(count, 2))
    cos, sin = torch.cos(angle), torch.sin(angle)
    matrix = torch.stack([torch.stack([cos, shear - sin], 1), torch.stack([sin, cos], 1)], 1) * scale[:, None, :]
    theta = torch.cat([matrix, 0.08 * draw(count, 2, 1)], 2)
    grid = F.affine_grid(theta, (count, 1, SIZE, SIZE), align_corners=False)
    wave = F.interpolate(0.07 * draw(count, 2, 4, 4), (SIZE, SIZE), mode="bicubic", align_corners=True)
    return grid + wave.permute(0, 2, 3, 1)


def render(count, generator):
    """(images of mean about 0 and deviation about 1, labels)"""
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    hands = torch.randint(len(HANDS), (count,), generator=generator)
    images = F.grid_sample(drawings()[hands, labels][:, None], warp(count, draw), align_corners=False)
    # A low threshold on the smooth drawing makes a wide stroke, a high one a thin one.
    images = torch.sigmoid(12 * (images - (0.45 + 0.12 * draw(count)).clamp(0.15, 0.8)[:, None, None, None]))
    images = F.avg_pool2d(F.pad(images, (1, 1, 1, 1)), 3, stride=1)
    images = (images * (0.8 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)) + 0.1 * draw(*images.shape)).clamp(0, 1)
    return (images - 0.2) / 0.3, labels


@functools.cache
def data():
    """(training images, labels, held-out images, labels)"""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = render(TRAINING + HELD_OUT, generator)
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]
