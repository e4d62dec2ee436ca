"""``cnn show-augmentation``: a grid of augmented images."""

import pytest
from PIL import Image

from millrace.cli import main


@pytest.mark.parametrize("ending", ["png", "jpg", "txt"])
def test_a_grid_of_augmented_images_is_written(tmp_path, ending):
    path = tmp_path / f"grid.{ending}"
    words = ["--flip", "True", "--alternating-flip", "--output", str(path)]
    with pytest.raises(SystemExit) as left:
        main(["cnn", "show-augmentation", *words])
    assert left.value.code == 0
    with Image.open(path) as grid:
        assert grid.format == ("JPEG" if ending == "jpg" else "PNG")


def test_a_grid_that_cannot_be_written_is_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none" / "grid.png"):
        with pytest.raises(SystemExit) as left:
            main(["cnn", "show-augmentation", "--output", str(path)])
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(f"millrace: Cannot write {path}: ")
    assert not list(tmp_path.iterdir())
