"""The blocks of docs/python.md, one after the other; those on other libraries if these are there."""

import importlib.util
import os
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python.md"
OTHERS = r"^import (torch|transformers|jax|matplotlib)\b"


def test_every_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setenv("MPLBACKEND", "Agg")
    page, names, skipped = PAGE.read_text(), {}, []
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.M | re.S))
    assert len(blocks) >= 12
    for block in blocks:
        missing = [name for name in re.findall(OTHERS, block[1], re.M) if importlib.util.find_spec(name) is None]
        if missing:
            skipped += missing
            continue
        line = page[:block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert os.path.exists("heads.html")
    if skipped:
        pytest.skip(f"the blocks on {', '.join(sorted(set(skipped)))} did not run")


def test_pictures_are_there():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / path).is_file(), path
