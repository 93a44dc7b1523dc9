"""Read by Python when it starts: puts the fault that MUTANT names into this process."""

import os
import sys
from pathlib import Path

if name := os.environ.get("MUTANT"):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.mutants import MUTANTS

    MUTANTS[name].apply(setattr)
