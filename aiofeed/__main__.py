"""``python -m aiofeed``."""

from __future__ import annotations

import sys

from aiofeed.reports.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
