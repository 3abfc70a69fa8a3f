"""A nightly CI job: run the tests, let an agent repair what fails, run the tests again, report.

It shows commands and turns with time limits, questions that nobody can answer at night, and exit
codes for the CI system. It uses the blocking API, because a job is a plain script.

Run it in a checkout, with the command that runs the tests:

    python nightly_ci.py --test-seconds 600 --agent-seconds 1800 -- make test

Without Claude Code, set AGENT="python -m banksman.testing.fake_agent", which repairs nothing.

You see one line for each step. `nightly.md` has the report, with the outputs. The exit code is 0 if
the tests pass at the end, 1 if they fail, and 124 if a time limit ended a step. After each step no
process is left, not even a server that a test started in the background and forgot.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import banksman
from banksman import threads

AGENT = os.environ.get("AGENT", "claude")
PASSED, FAILED, TIMED_OUT = 0, 1, 124


def report(title: str, details: str = "") -> None:
    """Print a step, and append it to the report with its details."""
    print(title, flush=True)
    block = f"```\n{details.rstrip()}\n```\n\n" if details else ""
    with Path("nightly.md").open("a", encoding="utf-8") as file:
        file.write(f"## {title}\n\n{block}")


def run_tests(argv: list[str], seconds: float) -> tuple[int, str]:
    """Run the tests once. Returns the exit code of this step, and the end of the output."""
    done = threads.execute(argv, timeout=seconds, stderr=subprocess.STDOUT)
    ending = f"code {done.code}" if done.ended is banksman.Ended.EXITED else str(done.ended)
    output = done.stdout.text
    report(f"tests: {ending}, {len(done.swept)} leftover processes ended", output)
    if done.ended is banksman.Ended.TIMEOUT:
        return TIMED_OUT, output[-4000:]
    return PASSED if done.code == 0 else FAILED, output[-4000:]


def no_person(question: banksman.Question) -> banksman.Answer:
    """Deny a tool that the rules do not allow. The agent learns the reason and continues."""
    report(f"denied: {question.tool}", str(question.input))
    return banksman.Answer("deny", message="Nobody can approve this at night. Work without it.")


def repair(output: str, seconds: float) -> int:
    """Ask the agent to repair the tests. Returns the exit code of this step."""
    with threads.Host("sqlite:nightly.db") as host:
        session = host.open(
            "claude",
            command=AGENT,
            rules={"Read": "allow", "Edit": "allow"},
            on_question=no_person,
            options={
                "clocks": {"overall": seconds}
            },  # This watchdog ends a turn that takes longer.
        )
        outcome = session.ask(f"Repair the code so that the tests pass:\n\n{output}").outcome()
    report(f"agent: {outcome.kind}", outcome.text or str(outcome.error or ""))
    if outcome.clock is not None:
        return TIMED_OUT
    return PASSED if outcome.kind is banksman.Outcome.DONE else FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests, and let an agent repair them.")
    parser.add_argument("--test-seconds", type=float, default=600)
    parser.add_argument("--agent-seconds", type=float, default=1800)
    parser.add_argument("command", nargs="+", help="the command that runs the tests")
    arguments = parser.parse_args()
    Path("nightly.md").write_text("# Nightly report\n\n", encoding="utf-8")
    code, output = run_tests(arguments.command, arguments.test_seconds)
    if code == FAILED:
        code = repair(output, arguments.agent_seconds)
        if code == PASSED:
            code, _ = run_tests(arguments.command, arguments.test_seconds)
    report(f"exit code: {code}")
    return code


sys.exit(main())
