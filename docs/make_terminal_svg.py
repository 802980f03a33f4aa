"""Makes docs/images/terminal.svg, the picture in the README, from what `pilotfish generate` prints.

    python docs/make_terminal_svg.py

The command runs as it is shown, and its output is drawn as it came: text, tokens and speed are this machine's.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COMMAND = ["pilotfish", "generate", "Write a haiku about the sea."]
WIDTH = 76
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def main() -> None:
    program = [sys.executable, "-c", "from pilotfish.cli import main; main()", *COMMAND[1:]]
    result = subprocess.run(program, capture_output=True, text=True, check=True)

    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (shlex.join(COMMAND), "bold")))
    console.print(Text(result.stdout.strip()))
    console.print(Text(result.stderr.strip(), style="dim"))
    # A fixed id: the picture changes only where the output does.
    svg = console.export_svg(title="pilotfish", theme=DIMMED_MONOKAI, unique_id="terminal")
    # Rich's picture fetches its font from another server, which is none of a README's business.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
