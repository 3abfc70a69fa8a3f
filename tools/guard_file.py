"""Build `dist/banksman-guard.pyz`: `banksman guard` as one file, for a Python without packages.

    python3 tools/guard_file.py [FILE]

The file runs on every Python from 3.11 on: `python3 banksman-guard.pyz -- COMMAND …`. It holds only
the modules that a guard imports, each as source and as bytecode of the Python that builds it. The
same version of Python then starts it without compiling. Every other version uses the source.
"""

from __future__ import annotations

import py_compile
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
FILE = ROOT / "dist" / "banksman-guard.pyz"

# Modules that are imported only when they are needed: a message, a failed start, an error.
LATE = ("banksman.guard.run", "banksman.guard.start", "banksman.process.program")
LATE_ERRORS = ("banksman.process.start_errors", "banksman.cli.output")
# An old Python must get this message and not a SyntaxError.
MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.stderr.write("banksman: guard needs Python 3.11 or newer\\n")
    sys.exit(125)
from banksman.cli import main

sys.exit(main(["guard", *sys.argv[1:]]))
"""
# The same time in every build, so that the same source makes the same file.
TIME = (1980, 1, 1, 0, 0, 0)


def modules() -> list[Path]:
    """Return the files of all modules of the package that a guard may import."""
    names = ("banksman.cli.commands.guard", *LATE, *LATE_ERRORS)
    code = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import {", ".join(names)}
for name, module in sys.modules.items():
    if name.partition(".")[0] == "banksman":
        print(module.__file__)
"""
    # Isolated, as the file will run: an import of a package that is not there fails here.
    argv = [sys.executable, "-I", "-S", "-c", code]
    found = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    return sorted(map(Path, found.stdout.splitlines()))


def build(file: Path) -> None:
    """Write the archive."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            _add(archive, "__main__.py", MAIN.encode())
            for path in modules():
                _add(archive, path.relative_to(SOURCE).as_posix(), path.read_bytes())
    file.chmod(0o755)


def _add(archive: zipfile.ZipFile, name: str, source: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, TIME), source, zipfile.ZIP_DEFLATED)
    with tempfile.TemporaryDirectory() as folder:
        path, compiled = Path(folder, "module.py"), Path(folder, "module.pyc")
        path.write_bytes(source)
        # Valid without a look at the source. zipimport skips the bytecode of another version of
        # Python, and uses the source beside it.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(path), str(compiled), name, doraise=True, invalidation_mode=mode)
        archive.writestr(
            zipfile.ZipInfo(f"{name}c", TIME), compiled.read_bytes(), zipfile.ZIP_DEFLATED
        )


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    build(file)
    print(f"wrote {file} ({file.stat().st_size // 1024} kB)")


if __name__ == "__main__":
    main()
