"""What an application needs of calcvm that PyInstaller does not see: modules imported by name, the page of a plan, sources.

Compiled code is kept by the sources it is made of, and scripts of `to_python` are written from some.
"""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

# applications that use these say so by importing them; they would bring scikit-learn and Typer
NAMED = ("calcvm.sklearn", "calcvm.cli", "calcvm.commands", "calcvm.__main__", "calcvm.__pyinstaller", "calcvm.data")

hiddenimports = collect_submodules("calcvm", filter=lambda name: not name.startswith(NAMED))
datas = [*collect_data_files("calcvm"), *copy_metadata("numba")]
module_collection_mode = "pyz+py"
