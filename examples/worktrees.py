"""A git worktree per session: several agents work on one repository without meeting.

It shows `on_open` and `on_close`, the commands that make and remove what a session works in. Each
task gets a session, a branch and a worktree of that branch. If the worktree cannot be made, the
session is not opened, and the error has what git says. After the session is closed and its agent is
gone, git removes the worktree. It refuses if the worktree has changes that are not committed, and
then the worktree stays, for you or for the next run.

Run it in a repository with at least one commit, with a branch and a prompt for each task:

    python worktrees.py "fix-typos=Fix the typos in README.md" "tests=Add a test for the parser"

Without Claude Code, take the scripted agent:

    AGENT="python -m banksman.testing.fake_agent" python worktrees.py one=Hello two=Hello

You see the answer of each agent and the worktrees while the agents work. Afterwards
`git worktree list` shows only those with changes, and the branches have the commits.
"""

import asyncio
import logging
import os
import sys

import banksman

AGENT = os.environ.get("AGENT", "claude")
# A worktree that git has refused to remove is there already, and a branch of an earlier run too.
ADD = """
test -e "$1/.git" || git -C "$0" worktree add "$1" "$2" 2> /dev/null ||
git -C "$0" worktree add -b "$2" "$1"
"""
REPOSITORY = os.getcwd()


async def work(host: banksman.Host, branch: str, prompt: str) -> None:
    """Do one task in a worktree of its own."""
    session = await host.open(
        "claude",
        name=branch,
        command=AGENT,
        cwd=f"{REPOSITORY}.worktrees/{branch}",
        on_open=["sh", "-c", ADD, REPOSITORY, "{cwd}", branch],
        on_close=["git", "-C", REPOSITORY, "worktree", "remove", "{cwd}"],
    )
    outcome = await (await session.ask(prompt)).outcome()
    print(f"{branch}: {outcome.kind}: {outcome.text or outcome.error or ''}", flush=True)


async def main(tasks: list[str]) -> None:
    async with (
        banksman.Host(f"sqlite:{REPOSITORY}.worktrees.db") as host,
        asyncio.TaskGroup() as group,
    ):
        for task in tasks:
            branch, _, prompt = task.partition("=")
            group.create_task(work(host, branch, prompt))


logging.basicConfig(format="%(message)s")
asyncio.run(main(sys.argv[1:]))
