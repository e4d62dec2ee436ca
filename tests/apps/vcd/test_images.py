"""Grids of images: apart from each other, and originals close to what became of them."""

import numpy as np
from PIL import Image

from millrace.apps.vcd.images import save_grids


def edges(line):
    """Return where a line of pixels changes between black and something else."""
    return np.flatnonzero(np.diff((line > 0).astype(int)))


def test_images_of_a_grid_are_enlarged_and_have_gaps(tmp_path):
    black = np.zeros((4, 3, 8, 8))
    grids = {"prior": black, "reconstructions": black}
    prior, pairs = (np.asarray(Image.open(path)) for path in save_grids(grids, tmp_path, 7))
    assert np.diff(edges(prior[30])).tolist() == [56, 6, 56, 6, 56]
    assert np.diff(edges(prior[:, 30])).tolist() == [56, 6, 56, 6, 56, 6, 56]
    assert np.diff(edges(pairs[:, 30])).tolist() == [56, 1, 56, 6, 56, 1, 56]
