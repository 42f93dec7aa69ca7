# ruff: noqa: N999 - the name by which PyInstaller finds it
"""PyInstaller's hook: the modules that are imported by a name in a text, which it does not see."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

datas = collect_data_files("polycephaly")  # of pages
hiddenimports = ["polycephaly.engines.inline", "polycephaly.integrations.dashboard"]
for package in ("engines.local", "green", "wire"):
    hiddenimports += collect_submodules(f"polycephaly.{package}")
