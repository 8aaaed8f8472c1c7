"""The package as a whole: layers, names, what an import costs, and how the strategy's name gets into Lightning."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lightning_replicate

PACKAGE = Path(lightning_replicate.__file__).parent
CORE_ORDER = (
    "api",
    "failures",
    "names",
    "dtensor",
    "clipping",
    "layout",
    "planning",
    "bucket",
    "sparse",
    "wire",
    "hook_state",
    "agreement",
    "group",
    "hooks",
    "reducer",
    "channel",
    "buffers",
    "marks",
    "collect",
    "stepping",
    "lazy",
    "switches",
    "state",
    "replicate",
)


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=os.path.sep,
    )


def _runtime_imports(path: Path) -> set[str]:
    """Modules that a file imports, but for those under ``if TYPE_CHECKING``."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_the_core_knows_torch_only() -> None:
    for path in (PACKAGE / "core").glob("*.py"):
        for name in _runtime_imports(path):
            top = name.partition(".")[0]
            assert top in {"torch", "lightning_replicate"} | set(sys.stdlib_module_names), f"{path.name}: {name}"
            if top == "lightning_replicate":
                assert name == top or name.split(".")[1] in {"core", "_private"}, f"{path.name}: {name}"


def test_each_layer_of_the_core_imports_lower_ones_only() -> None:
    files = {path.stem for path in (PACKAGE / "core").glob("*.py")} - {"__init__"}
    assert files == set(CORE_ORDER)
    for position, layer in enumerate(CORE_ORDER):
        imported = {
            name.split(".")[2]
            for name in _runtime_imports(PACKAGE / "core" / f"{layer}.py")
            if name.startswith("lightning_replicate.core.")
        }
        assert imported & files <= set(CORE_ORDER[:position]), f"{layer} imports {imported}"


def test_private_names_live_in_one_file() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name in {"_private.py", "_autoload.py"}:
            continue
        for name in _runtime_imports(path):
            parts = name.split(".")
            if parts[0] != "lightning_replicate":
                assert not any(part.startswith("_") and not part.startswith("__") for part in parts), f"{path}: {name}"
        assert "torch._" not in path.read_text(), path


def test_files_stay_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 425, path


def test_public_names() -> None:
    assert sorted(lightning_replicate.__all__) == list(lightning_replicate.__all__)
    for name in lightning_replicate.__all__:
        assert getattr(lightning_replicate, name) is not None
        assert name in dir(lightning_replicate)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lightning_replicate.nothing  # noqa: B018
    assert lightning_replicate.__version__ == importlib.metadata.version("lightning-replicate")


def test_an_import_loads_neither_torch_nor_lightning() -> None:
    heavy = "{'torch', 'lightning', 'pytorch_lightning', 'numpy'}"
    done = _python(f"import sys, lightning_replicate; print({heavy} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr
    done = _python(
        "import sys, lightning_replicate; lightning_replicate.replicate;"
        "print({'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr


def _at_once(run: Callable[[str], str], inputs: Sequence[str]) -> list[str]:
    """Runs programs two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, inputs))


TRAINER = "{twin}.Trainer(strategy='{name}', accelerator='cpu', devices=1, logger=False, barebones=True)"


def _trainer(twin: str = "lightning.pytorch", name: str = "replicate", before: str = "", **environment: str) -> str:
    code = f"{before}\nimport {twin}\nprint(type({TRAINER.format(twin=twin, name=name)}.strategy).__mro__)"
    done = _python(code, **environment)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("twin", ["lightning.pytorch", "pytorch_lightning"])
def test_the_name_works_without_an_import_of_ours(twin: str) -> None:
    out, after_others = _at_once(lambda before: _trainer(twin, before=before), ["", "import torch, lightning"])
    assert "ReplicateStrategy" in out and f"{twin}.strategies.ddp.DDPStrategy" in out
    assert "ReplicateStrategy" in after_others


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicate_spawn", "replicate_fork", "replicate_notebook"])
def test_aliases(name: str) -> None:
    done = _python(
        f"import lightning.pytorch as pl; s = pl.strategies.StrategyRegistry.get('{name}'); print(s._start_method)"
    )
    assert done.stdout.strip() == {"replicate_spawn": "spawn"}.get(name, "fork"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["TORCH_DEVICE_BACKEND_AUTOLOAD", "LIGHTNING_REPLICATE_AUTOLOAD"])
def test_with_autoload_off_an_import_registers(switch: str) -> None:
    imports = [
        "import lightning_replicate",
        "import torch, lightning_replicate",
        "import lightning.pytorch, lightning_replicate",
        "from lightning_replicate import ReplicateStrategy",
    ]
    without, *outs = _at_once(lambda before: _trainer(before=before, **{switch: "0"}), ["", *imports])
    assert "invalid strategy name" in without
    for before, out in zip(imports, outs, strict=True):
        assert "ReplicateStrategy" in out, before


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["_autoload.py", "strategy/trainer.py"])
def test_import_torch_survives_a_failure_of_ours(broken: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "lightning_replicate", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lightning_replicate" / broken).write_text("raise RuntimeError('injected')\n")
    code = "import torch, lightning.pytorch, lightning_replicate; print(lightning_replicate.__file__, torch.ones(1))"
    done = _python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and str(tmp_path) in done.stdout and "tensor([1.])" in done.stdout, done.stderr
    if broken == "_autoload.py":
        assert "could not register its strategy: RuntimeError('injected')" in done.stderr
    # a bug within the registration itself, when Lightning is imported
    (tmp_path / "lightning_replicate" / broken).write_text(
        (PACKAGE / broken)
        .read_text()
        .replace("registry = getattr", "raise RuntimeError('injected')\n    registry = getattr")
    )
    done = _python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_command_line_sees_every_option() -> None:
    import jsonargparse

    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(lightning_replicate.ReplicateStrategy, "strategy")
    parsed = parser.parse_args(["--strategy.bucket_cap_mb=3", "--strategy.replicate=[encoder, head*]"])
    assert parsed.strategy.bucket_cap_mb == 3
    assert parsed.strategy.replicate == ["encoder", "head*"]
    with pytest.raises((SystemExit, jsonargparse.ArgumentError)):
        parser.parse_args(["--strategy.average=median"])


def test_ddp_options_are_accepted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    with caplog.at_level(logging.INFO):
        lightning_replicate.ReplicateStrategy(find_unused_parameters=True, static_graph=True)
    messages = [record.getMessage() for record in caplog.records if "find_unused_parameters" in record.getMessage()]
    assert len(messages) == 1 and "static_graph=True" in messages[0]
