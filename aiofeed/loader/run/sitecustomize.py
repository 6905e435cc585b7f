"""Each Python process under ``aiofeed run`` imports this module at its start, by way of ``PYTHONPATH``."""

import importlib.util
import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# A script may start a process with a part of its environment.
_OPTIONS = json.loads(os.environ.get("AIOFEED_RUN") or "{}")

# The script sees the path that it has without aiofeed. Its children need the variable.
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
# An interpreter of another environment may lack what aiofeed needs.
if _OPTIONS.get("prefix") == sys.prefix:
    if importlib.util.find_spec("aiofeed") is None:
        sys.path.append(os.path.abspath(os.path.join(_FOLDER, "..", "..", "..")))
    from aiofeed.loader.run import hook

    hook.replace_when_imported(_OPTIONS)
# The environment's own module of this name. If there is none, this raises the error that Python expects then.
del sys.modules[__name__]
importlib.import_module(__name__)
