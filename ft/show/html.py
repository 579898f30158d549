"""Build HTML from the macros of ``report.html``, which escape every value that is not HTML made by another macro."""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

NOTHING = Markup("")


@functools.cache
def _macros() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).module


def html(macro: str, *arguments: Any, **named: Any) -> Markup:
    """Return the HTML that a macro of the template makes of its arguments."""
    return getattr(_macros(), macro)(*arguments, **named)


def joined(*parts: Markup) -> Markup:
    """Return HTML of several pieces, one after the other."""
    return NOTHING.join(parts)
