"""Which module may import which; and what importing the package costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_mp"

#: What each part of the package may import of the others. Longest prefix wins.
MAY_IMPORT = {
    "files": set(),
    "numerics": {"numerics", "files"},
    "cost": {"cost", "numerics"},
    "masters": {"numerics", "cost"},
    "swap": {"masters", "numerics", "cost"},
    "gradients": {"masters", "numerics", "cost"},
    "module": {"masters", "numerics", "cost"},
    "strategies": {"cost", "numerics"},
    "averaging": {"module", "masters", "cost", "numerics"},
    "edits": {"averaging", "cost", "numerics"},
    "scaling": {"gradients", "swap", "numerics"},
    "schedulers": set(),
    "plugin": {
        *(
            "averaging",
            "edits",
            "masters",
            "swap",
            "gradients",
            "module",
            "scaling",
            "schedulers",
            "strategies",
            "cost",
            "numerics",
        )
    },
    "trainer": {"plugin", "strategies", "cost", "numerics"},
    "callbacks": {"callbacks", "cost", "numerics", "files"},
    "report": {"report", "callbacks", "plugin", "trainer", "cost", "numerics", "files", ""},
    "cli": {"report", "callbacks", "plugin", "trainer", "cost", "numerics", "files", ""},
    "__main__": {"cli"},
    "": {"plugin", "trainer", "callbacks", "numerics"},
}
#: Outside packages that only some parts may import.
ONLY_IN = {
    "wandb": {"report.wandb", "callbacks.wandb"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "jsonargparse": {"cli"},
    "lightning.pytorch.cli": {"cli"},
}
#: Outside packages that the numeric core knows.
NUMERIC_CORE = {"torch", *sys.stdlib_module_names}


def part_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(source: str) -> set[str]:
    """The full names of everything that the source imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("")
        parts = [part for part in relative.parts if part != "__init__"]
        found.append((".".join(parts), path))
    return found


def violations(module: str, imported: set[str]) -> list[str]:
    bad = []
    for name in imported:
        if name == "lightning_mp" or name.startswith("lightning_mp."):
            target = part_of(name.removeprefix("lightning_mp").removeprefix("."))
            is_public_name = target[:1].isupper() or target.startswith("__version")
            target = "" if is_public_name else target
            if target != part_of(module) and target not in MAY_IMPORT[part_of(module)]:
                bad.append(f"{module} imports {name}")
        for package, allowed in ONLY_IN.items():
            if (name == package or name.startswith(f"{package}.")) and not {module, part_of(module)} & allowed:
                bad.append(f"{module} imports {name}")
        if part_of(module) == "numerics" and part_of(name) not in {*NUMERIC_CORE, "lightning_mp"}:
            bad.append(f"{module} imports {name}")
        if part_of(module) == "numerics" and name.startswith(("torch.nn", "torch.optim", "torch.distributed")):
            bad.append(f"{module} imports {name}")
    return bad


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name or "lightning_mp" for name, _ in modules()])
def test_imports_point_down(module, path):
    assert violations(module, imports_of(path.read_text())) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("numerics.split", "import lightning.pytorch"),
        ("numerics.split", "from lightning_mp.masters import Masters"),
        ("numerics.split", "from torch.nn import Module"),
        ("callbacks.run_recorder", "from lightning_mp.plugin import MasterWeightPrecision"),
        ("callbacks.run_recorder", "from lightning_mp import MasterWeightPrecision"),
        ("plugin", "def f():\n    import lightning_mp.callbacks"),
        ("masters", "import wandb"),
        ("report.compare", "from lightning.pytorch.cli import LightningCLI"),
    ],
)
def test_an_import_that_points_up_is_found(module, source):
    assert violations(module, imports_of(source))


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, lightning_mp; print([m for m in ('torch', 'lightning', 'wandb', 'jsonargparse') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    import lightning_mp

    for name in lightning_mp.__all__:
        assert getattr(lightning_mp, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lightning_mp.no_such_name
