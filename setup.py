"""Adds pyproject.toml to the package `protocol` in wheels: it holds every key's default."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithDefaults(build_py):
    """build_py that also copies pyproject.toml; editable installs read the checkout's own."""

    def run(self) -> None:
        """Copy the packages, then pyproject.toml."""
        super().run()
        if not self.editable_mode:
            self.copy_file("pyproject.toml", str(Path(self.build_lib, "protocol/pyproject.toml")))


setup(cmdclass={"build_py": BuildWithDefaults})
