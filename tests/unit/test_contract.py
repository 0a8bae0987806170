"""`adaptivespec.sglang_plugin.contract`: the installed SGLang keeps it, and a doctored one is refused by name."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

import adaptivespec
from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin import contract
from adaptivespec.sglang_plugin.contract import CPU_ENGINE, LIGHT, TOKENIZER, WORKER, Touch

ALL = (*LIGHT, *WORKER, *TOKENIZER, *CPU_ENGINE)


@pytest.mark.parametrize("touch", ALL, ids=lambda touch: touch.path)
def test_the_installed_sglang_keeps_the_contract(touch):
    contract.check((touch,))


def test_no_name_is_listed_twice_and_each_says_how_and_why():
    for checked_together in (LIGHT, WORKER, TOKENIZER, CPU_ENGINE):
        paths = [touch.path for touch in checked_together]
        assert sorted(paths) == sorted(set(paths))
    assert {touch.how for touch in ALL} <= {"subclass", "call", "read", "wrap", "bind"}
    assert all(touch.why for touch in ALL)
    # What is replaced or overridden must be known in full.
    assert [touch.path for touch in ALL if touch.how == "wrap" and touch.parameters is None] == []


def test_the_pinned_version_is_the_installed_one():
    from adaptivespec.sglang_plugin.refusals import SGLANG_VERSION

    assert importlib.metadata.version("sglang") == SGLANG_VERSION


@pytest.mark.parametrize(
    ("path", "parameters", "found", "expected"),
    [
        (
            "srt.arg_groups.resolution_hooks:register_resolution_hook",
            "name priority",
            "parameters (name)",
            "(name, priority), for: a test",
        ),
        (
            "srt.arg_groups.overrides:declare_resolution",
            "server_args fields source",
            "parameters (server_args,",
            "for: a test",
        ),
        ("srt.arg_groups.overrides:no_such_name", None, "nothing (module", "it to exist, for: a test"),
        ("srt.no_such_module:name", "", "nothing (No module named", "it to exist, for: a test"),
        ("srt.speculative.spec_registry:CustomSpecAlgo.no_such_method", "", "nothing (type object", "it to exist"),
    ],
)
def test_what_differs_is_refused_and_named(path, parameters, found, expected):
    with pytest.raises(RefusedError) as caught:
        contract.check((LIGHT[0], Touch(path, parameters, "call", "a test")))
    error = caught.value
    assert error.reason == "contract"
    assert error.where == f"sglang.{path}"
    assert error.found.startswith(found)
    assert expected in error.expected
    assert "install sglang==0.5.23 unmodified" in str(error)


def test_a_function_that_another_plugin_replaced_is_refused(monkeypatch):
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "declare_resolution", lambda *args, **kwargs: None)
    with pytest.raises(RefusedError, match="declare_resolution: found parameters \\(args, kwargs\\)"):
        contract.check()


def test_a_wrapper_that_keeps_the_signature_passes(monkeypatch):
    import functools

    from sglang.srt.arg_groups import overrides

    original = overrides.declare_resolution
    monkeypatch.setattr(overrides, "declare_resolution", functools.wraps(original)(lambda *args, **kwargs: None))
    contract.check()


def imported_from_sglang() -> set[str]:
    """Every name that the packages import from SGLang at run time, as the table writes it; a module as ``module:``."""
    found = set()
    for file in Path(adaptivespec.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        ignored = {id(inner) for node in for_types for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("sglang.")
                and id(node) not in ignored
            ):
                found |= {f"{node.module.removeprefix('sglang.')}:{name.name}" for name in node.names}
    return found


def test_whatever_is_imported_from_sglang_is_in_the_table():
    listed = [touch.path for touch in ALL]
    imported = imported_from_sglang()
    assert len(imported) > 40
    missing = {
        name
        for name in imported
        if not any(path == name or path.startswith((f"{name}.", f"{name.replace(':', '.')}:")) for path in listed)
    }
    assert not missing
