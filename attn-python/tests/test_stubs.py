"""The stubs name what there is: functions, methods, their positional parameters in order and their keywords."""

import ast
import inspect
import pathlib

import attn

STUBS = ast.parse((pathlib.Path(attn.__file__).parent / "_attn.pyi").read_text())


def parameters(function):
    """Names of a stub's parameters: positional ones, and keywords, whose order says nothing."""
    given = function.args
    return [x.arg for x in (*given.posonlyargs, *given.args)], {x.arg for x in given.kwonlyargs}


def shown(function):
    """The same of what is there."""
    given = inspect.signature(function).parameters.values()
    keywords = {x.name for x in given if x.kind is x.KEYWORD_ONLY}
    return [x.name for x in given if x.name not in keywords], keywords


def functions(body):
    """The longest form of each function."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            known, new = found.get(node.name, ([], set())), parameters(node)
            found[node.name] = max(known, new, key=lambda both: len(both[0]) + len(both[1]))
    return found


def test_functions_have_their_parameters():
    stubs = functions(STUBS.body)
    assert stubs.pop("heatmap_page")  # inner: its keywords are those of heatmap
    for name, names in stubs.items():
        assert shown(getattr(attn._attn, name)) == names, name
    others = {"Cache", "Heatmap", "__version__", "heatmap"}  # a class, and what _heatmap.py types itself
    assert set(stubs) | others == set(attn.__all__)


def test_the_cache_has_its_methods():
    body = next(node for node in STUBS.body if isinstance(node, ast.ClassDef)).body
    stubs = functions(body)
    found = {name for name in vars(attn.Cache) if not name.startswith("_")}
    assert {name for name in stubs if not name.startswith("_")} == found
    assert shown(attn.Cache) == (stubs["__new__"][0][1:], stubs["__new__"][1])
    for name in ("append", "decode", "prefill", "truncate"):
        assert shown(getattr(attn.Cache, name)) == stubs[name], name
