"""`python -m toka_async.evaluation`: the command `lm_eval`, which also knows `--model toka`.

lm_eval looks for no models in other packages, so something has to register this one before the command runs.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        print(f"toka-async: {error}: pip install 'toka-async[evaluation]'", file=sys.stderr)
        return 2
    import_module("lm_eval.models")  # registers lm_eval's own models, which it would do in an empty registry only
    model_registry.register("toka", target="toka_async.evaluation.lm_eval_model:TokaLM")
    cli_evaluate()
    return 0


if __name__ == "__main__":  # the engine's processes import the main module again
    sys.exit(main())
