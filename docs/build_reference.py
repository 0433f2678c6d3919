"""Write the pages of docs/ that follow from the code: run by `make docs`.

A test compares each page with what this gives, so none can be out of date.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / ".import"))

import click  # noqa: E402

from treadle import cli  # noqa: E402
from treadle.ir import knobs  # noqa: E402

NOTICE = "<!-- Written by `make docs` from the code; changes here are lost. -->"


def cli_page() -> str:
    """Describe every command with its options and examples, and the environment variables."""
    lines = [NOTICE, "", "# The command line", ""]
    lines += _paragraphs(cli.group.help or "")
    lines += ["| command | what it does |", "|---|---|"]
    for name, command in sorted(cli.group.commands.items()):
        lines.append(f"| [`{name}`](#{name}) | {command.get_short_help_str(limit=100)} |")
    lines += ["", cli.group.epilog or "", ""]
    # A context of the group's, because a command keeps the help option of its first context.
    parent = cli.group.make_context("treadle", [], resilient_parsing=True)
    for name, command in sorted(cli.group.commands.items()):
        context = click.Context(command, info_name=name, parent=parent)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {name}", "", f"    treadle {name} {usage}", ""]
        lines += _paragraphs(command.help or "")
        lines += ["| option | what it does |", "|---|---|"]
        lines += [
            _option_row(option) for option in command.params if isinstance(option, click.Option)
        ]
        lines.append("")
    lines += ["## Environment variables", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{knob.variable}` | {_cell(knob.doc)} |" for knob in knobs.ALL]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    """Turn a help text into markdown; what click must not wrap (after `\\b`) becomes code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            lines += [paragraph.replace("*", "\\*"), ""]
            continue
        code = paragraph.removeprefix("\b\n").splitlines()
        if code[0] == "Examples:":
            lines += ["Examples:", ""]
            code = code[1:]
        lines += ["```", *textwrap.dedent("\n".join(code)).splitlines(), "```", ""]
    return lines


def _option_row(option: click.Option) -> str:
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if isinstance(option.type, click.Choice):
        value = " " + " \\| ".join(f"`{choice}`" for choice in option.type.choices)
    elif option.is_flag:
        value = ""
    else:
        value = f" {option.metavar or option.type.name.upper()}"
    text = option.help or ""
    if option.show_default and option.default is not None:
        text += f" Default: {option.default}."
    return f"| {names}{value} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"cli.md": cli_page}


def main() -> None:
    """Write every page whose text has changed."""
    for name, build in PAGES.items():
        page, text = DOCS / name, build()
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
