"""Copy the tables of other trainers' names from the package, which answers with them, into ``docs/migration.md``.

Run it after a change of the tables: ``python docs/make_migration_tables.py``.
"""

import re
from pathlib import Path

from lightning_rlbatch.cli.translations import TABLES

PAGE = Path(__file__).with_name("migration.md")
_TABLES = re.compile(r"(<!-- tables: ([\w ]+?) \(.*?-->\n).*?(<!-- end of tables -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the page with the tables as they stand in the package.

    Args:
        page: Text of the page, with a pair of comments around each place of tables.
    """
    return _TABLES.sub(lambda match: f"{match[1]}\n{TABLES.read(match[2])}\n\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
