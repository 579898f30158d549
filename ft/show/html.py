"""Build the HTML fragments of ``report.html``, a page that loads nothing from the network."""

import base64
import html
from collections.abc import Iterable
from typing import Any

from ft.show.style import CSS


def safe(text: Any) -> str:
    """Return ``text`` as HTML with special characters escaped."""
    return html.escape(str(text))


def document(title: str, sections: Iterable[str]) -> str:
    """Return the whole page; ``sections`` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}: report</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def header(name: str, subtitle: str) -> str:
    """Return the head of the page: name and subtitle."""
    return f"<header><h1>{safe(name)}</h1><p>{safe(subtitle)}</p></header>"


def section(title: str, content: str) -> str:
    """Return a section with a heading; ``content`` is HTML."""
    return f"<section><h2>{safe(title)}</h2>{content}</section>"


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return the headline figures as HTML; each is given as (name, value, note)."""
    shown = (
        f"<div><b>{safe(value)}</b><span>{safe(name)}</span><small>{safe(note)}</small></div>"
        for name, value, note in figures
    )
    return f'<section class="cards">{"".join(shown)}</section>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table of texts, which are escaped."""
    top = "".join(f"<th>{safe(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def picture(png: bytes, alt: str) -> str:
    """Return ``png`` embedded as an HTML image."""
    content = base64.b64encode(png).decode()
    return f'<img alt="{safe(alt)}" src="data:image/png;base64,{content}">'
