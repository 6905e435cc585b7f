"""Checks that pyright knows the type of every public symbol of the package.

The exception is ``FeederMonitor``: its base class is that of the package of Lightning that the program uses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

UNKNOWN = {"aiofeed.lightning.FeederMonitor"}

command = [sys.executable, "-m", "basedpyright", "--verifytypes", "aiofeed", "--ignoreexternal", "--outputjson"]
# It imports with the first `python` of the path.
env = os.environ | {"PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
report = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False).stdout)
symbols = report["typeCompleteness"]["symbols"]
problems = [
    f"{each.get('file', symbol['name'])}: {each['message']} ({symbol['name']})"
    for symbol in symbols
    for each in symbol["diagnostics"]
    if symbol["name"] not in UNKNOWN and not symbol["isTypeKnown"]
]
sys.exit("\n".join(problems) or ("pyright found no package aiofeed" if len(symbols) < 1000 else 0))
