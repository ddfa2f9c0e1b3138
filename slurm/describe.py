"""Print name, directory and attempts of the run that a config and overrides describe, a line each.

    python slurm/describe.py CONFIG [key=value …]

Exit code 2 and one line when they are wrong: a batch file asks before it starts a thousand ranks.
"""

import sys

from megafrontier.config import load_config, load_machine
from megafrontier.errors import UserError

try:
    config = load_config(sys.argv[1], sys.argv[2:])
    load_machine(config.machine)
except UserError as error:
    print(f"megafrontier: {error}", file=sys.stderr)
    sys.exit(2)
print(config.run.name, config.run.directory, config.train.attempts, sep="\n")
