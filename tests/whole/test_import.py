"""Import the package: what takes long is imported where it is first used."""

import subprocess
import sys

SLOW = ("sympy", "sklearn", "matplotlib", "torch.distributed.tensor", "onnx", "transformers")


def test_import_leaves_slow_packages_to_their_first_use() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import structured_ensembles;"
        f"print([name for name in {SLOW} if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
