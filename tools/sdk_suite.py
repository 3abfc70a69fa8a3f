"""Run the test suite of claude-agent-sdk twice, without and with the drop-in, and compare.

    BANKSMAN_SDK_SOURCE=…/claude_agent_sdk-0.2.182 python tools/sdk_suite.py

`BANKSMAN_SDK_SOURCE` is a source folder of the SDK with its `tests/`, in the installed version: the
sdist of the registry has it. This script fetches nothing. It exits with 0 if the same tests pass
with the drop-in as without. Arguments are passed to pytest.

Runs in the development environment, because the tests import the SDK and Banksman.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

VARIABLE = "BANKSMAN_SDK_SOURCE"
# These test the SDK's releases, and need its repository, its build tools or S3.
LEFT_OUT = (
    *("test_changelog.py", "test_build_wheel.py", "test_download_cli.py"),
    *("test_update_cli_version.py", "test_example_s3_session_store.py"),
    "test_example_s3_session_store_live.py",
)
SECONDS_MAX = 900


def source() -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder or not (Path(folder) / "tests" / "test_transport.py").is_file():
        sys.exit(
            f"cannot run the SDK's tests: {VARIABLE} names no source folder of claude-agent-sdk\n"
            "Run `pip download --no-deps --no-binary :all: claude-agent-sdk==0.2.182`, unpack the "
            f"archive outside of the checkout, and set {VARIABLE} to its folder."
        )
    return Path(folder).resolve()


def run(folder: Path, arguments: "list[str]", *, drop_in: bool) -> "dict[str, str]":
    """Run the suite. Return the outcome of each test by its name."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junit-xml={report}", f"--rootdir={folder}"]
        command += [f"--ignore={folder / 'tests' / name}" for name in LEFT_OUT]
        if drop_in:
            command += ["-p", "sdk_suite"]
        # The plugin is this file.
        paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        subprocess.run(
            [*command, *arguments, "tests"],
            cwd=folder,
            env=environment,
            check=False,
            timeout=SECONDS_MAX,
        )
        if not report.exists():
            sys.exit("cannot compare: pytest wrote no report")
        return dict(outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def outcome(case: ElementTree.Element) -> "tuple[str, str]":
    name = f"{case.get('classname')}::{case.get('name')}"
    kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
    return name, min(kinds, default="passed")


def pytest_configure() -> None:
    """Install the drop-in, where pytest loads this file as a plugin."""
    import banksman.claude_sdk  # noqa: PLC0415

    banksman.claude_sdk.install()


def main() -> None:
    folder = source()
    without = run(folder, sys.argv[1:], drop_in=False)
    with_it = run(folder, sys.argv[1:], drop_in=True)
    for name, outcomes in (("without", without), ("with", with_it)):
        print(f"{name:8} the drop-in: {dict(Counter(outcomes.values()))}")
    differing = [name for name in without | with_it if without.get(name) != with_it.get(name)]
    for name in differing:
        print(f"differs: {name}: {without.get(name)} without, {with_it.get(name)} with")
    sys.exit(bool(differing) or not without)


if __name__ == "__main__":
    main()
