"""The public face of the package."""

from __future__ import annotations

import subprocess
import sys

import pilotfish


def test_every_public_name_exists_and_no_other_is_listed() -> None:
    for name in pilotfish.__all__:
        assert getattr(pilotfish, name) is not None
    assert sorted(pilotfish.__all__, key=str.casefold) != []
    assert not hasattr(pilotfish, "no_such_name")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, pilotfish, pilotfish.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
