"""The scripts of attn-python/examples."""

import pathlib
import runpy

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_both_trainings_lose_the_same(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_torch.py"))
    (theirs, _), (ours, _) = (example["train"](12, ours) for ours in (False, True))
    assert len(ours) == 12 and ours[-1] < 0.7 * ours[0]
    assert max(abs(a - b) for a, b in zip(theirs, ours)) < 1e-3
    pytest.importorskip("matplotlib")
    example["draw"](theirs, ours, str(tmp_path / "curves.svg"))
    assert "torch's attention" in (tmp_path / "curves.svg").read_text()
