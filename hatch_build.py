"""Compile the hot modules into the wheel, where that is asked for; see pyproject.toml for which.

    HATCH_BUILD_HOOKS_ENABLE=1 python -m build --wheel

mypyc translates them to C from their type hints. Both packages are compiled as one group in a directory of their own,
so nothing is written into the source tree, and calls from one compiled module to another are calls of C functions.
Each module of the group becomes a small extension beside its source; the code of all is in one shared library.

The sources stay in the wheel: tracebacks show them, and an interpreter that cannot load the extensions reads them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What mypy reads beside the modules themselves. Nothing that is compiled knows the types of the packages that are
# skipped, and to read torch takes mypy minutes. Errors in other modules are for `make types` to tell.
_SKIPPED = ("fsspec", "hypothesis", "matplotlib", "pytest", "rich", "scipy", "sklearn", "torch", "typer")
_MYPY = f"""
[mypy]
follow_imports = silent

[mypy-{",".join(f"{name}.*" for name in _SKIPPED)}]
follow_imports = skip
"""

# -O1 is as fast as -O2 here, to the noise of the measurement, and compiles in half the time. Asserts stay.
_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

files = ["--config-file", "mypy.ini", *{files!r}]
modules = mypycify(files, opt_level="1", debug_level="0", group_name="quicoll", multi_file=True)
setup(name="quicoll", packages=[], ext_modules=modules)
"""


class CompiledBuildHook(BuildHookInterface[Any]):
    """See the module's head. Hatchling makes it and calls it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the extensions to the wheel. An editable install reads the source.

        Raises:
            RuntimeError: The compiler failed; its output is in the text.
        """
        if version == "editable":
            return
        stage = Path(tempfile.mkdtemp(prefix="quicoll-compiled-"))
        self._stage = stage
        for package in self.build_config.packages:
            source = Path(self.root, package)
            shutil.copytree(source, stage / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
        files = [str(path.relative_to(stage)) for path in self._files(stage)]
        (stage / "mypy.ini").write_text(_MYPY, encoding="utf-8")
        setup = stage / "setup.py"
        setup.write_text(_SETUP.format(files=files), encoding="utf-8")
        done = subprocess.run(  # noqa: S603 - this interpreter, on a file written above
            [sys.executable, setup.name, "build_ext", "--inplace"],
            cwd=stage,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"mypyc or the C compiler failed:\n{done.stdout}")
        for pattern in ("*.so", "*.pyd"):
            for made in sorted(stage.rglob(pattern)):
                place = made.relative_to(stage)
                if place.parts[0] != "build":
                    build_data["force_include"][str(made)] = str(place)
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        if version != "editable":
            shutil.rmtree(self._stage, ignore_errors=True)

    def _files(self, stage: Path) -> list[Path]:
        """Return the modules to compile, in `stage`, in order."""
        chosen: dict[str, set[str]] = {}
        for key in ("compiled", "interpreted"):
            chosen[key] = set()
            for pattern in self.config[key]:
                found = sorted(Path(self.root).glob(pattern))
                if not found:
                    raise RuntimeError(f"{key!r} in pyproject.toml names {pattern}, and there is no such module")
                chosen[key].update(str(path.relative_to(self.root)) for path in found)
        packages = {str(Path(package)): Path(package).name for package in self.build_config.packages}
        return [
            stage / name / Path(path).relative_to(package)
            for path in sorted(chosen["compiled"] - chosen["interpreted"])
            for package, name in packages.items()
            if Path(path).is_relative_to(package)
        ]
