"""The blocks of docs/python.md, one after the other; those on torch and transformers if these are there."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python.md"


def test_every_block_runs():
    page, names = PAGE.read_text(), {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.M | re.S))
    assert len(blocks) >= 9
    for block in blocks:
        for module in re.findall(r"^import (torch|transformers)$", block[1], re.M):
            pytest.importorskip(module)
        line = page[:block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
