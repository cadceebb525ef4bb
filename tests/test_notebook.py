"""The quickstart notebook runs from top to bottom, learns, and is stored without outputs."""

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for needed in ("ipykernel", "sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "".join(parts)


def test_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert not cell.outputs and cell.execution_count is None


def test_quickstart_learns_to_read_digits(tmp_path, monkeypatch):
    # The kernel starts in tmp_path: it must find the package as a user would, or by this path.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # This interpreter's kernel, whatever kernels are registered on the machine.
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "\n".join(text_of(cell) for cell in code_cells(notebook))
    accuracy = dict(re.findall(r"(eager|jit): held-out accuracy ([\d.]+)%", printed))
    assert set(accuracy) == {"eager", "jit"}, printed
    assert all(float(value) >= 97 for value in accuracy.values()), accuracy
    pictures = [o for cell in code_cells(notebook) for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
