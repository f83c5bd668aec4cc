"""Extension of griffe: turns what Sphinx would read in docstrings (roles, ``::`` blocks) into Markdown for the API reference."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([^`]+)`")
BLOCK = re.compile(r"^( *)Example::$", re.MULTILINE)
DOCTEST = re.compile(r"^( *)Example:$", re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring.

        Args:
            obj: What it belongs to.
            **kwargs: What griffe passes besides.
        """
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"\1Examples:", BLOCK.sub(r"\1**Example**", text))
