"""The public names of `import regard`."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCE = ast.parse(Path(str(regard.__file__)).read_text())


def for_type_checkers() -> dict[str, str]:
    """Return name -> module of the imports under `if TYPE_CHECKING`."""
    (block,) = [n for n in SOURCE.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {alias.name: str(n.module) for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names}


def test_all_lists_the_names_that_type_checkers_see() -> None:
    assert sorted(regard.__all__) == sorted(for_type_checkers())
    assert regard.__all__ == sorted(regard.__all__)
    assert len(set(regard.__all__)) == len(regard.__all__)


@pytest.mark.parametrize("name", regard.__all__)
def test_every_name_is_imported_from_the_module_that_defines_it(name: str) -> None:
    value = getattr(regard, name)
    assert value is getattr(sys.modules[for_type_checkers()[name]], name)
    assert value.__module__ == for_type_checkers()[name], "export a name from the module that defines it"
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'nothing'"):
        regard.nothing  # noqa: B018


def test_dir_lists_the_public_names() -> None:
    assert dir(regard) == sorted([*regard.__all__, "__version__"])


def test_no_function_shares_its_name_with_a_module() -> None:
    """`import regard.x` would replace the function x by the module."""
    modules = {module.name for module in pkgutil.iter_modules(regard.__path__)}
    assert not modules & set(regard.__all__)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_does_not_import_torch() -> None:
    assert (
        run("import sys, regard; print(regard.__version__, 'torch' in sys.modules)") == f"{regard.__version__} False\n"
    )


def test_errors_and_tree_functions_do_not_import_torch() -> None:
    assert run("import sys; from regard import swap, SpecError; print('torch' in sys.modules)") == "False\n"


def test_star_import_gives_the_public_names() -> None:
    assert run("from regard import *; print(preset.__name__, EncoderDecoder.kind)") == "preset encoder_decoder\n"


def test_public_functions_and_methods_are_documented() -> None:
    for name in regard.__all__:
        value = getattr(regard, name)
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            public = inspect.isfunction(member) and not attribute.startswith("_") and attribute in member.__qualname__
            # A method that overrides one of an abstract class may have its docstring there (`getdoc` inherits it).
            assert not public or inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"
