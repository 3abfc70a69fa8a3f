"""Write the golden files: `python -m tests.core.dialects.recordings.regolden`. `git diff` shows the changes."""

from __future__ import annotations

from tests.core.dialects.recordings import corpus

from banksman.core.dialects.claude import CLAUDE


def main() -> None:
    for name in corpus.NAMES:
        path = corpus.golden(name)
        text = corpus.projected(name, CLAUDE.project)
        before = path.read_text(encoding="utf-8") if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{'same   ' if text == before else 'written'} {path.name}")


if __name__ == "__main__":
    main()
