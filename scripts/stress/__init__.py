"""Many programs at once on one real mount, and the bytes that each of them may see.

- `scenario`: the contents of a scenario file
- `training`: small models that train, and their checkpoints
- `content`: the content of a file: its state, its digests, the allowed effect of quantizing
- `ledger`: the bytes that each file may show, kept by one process for all
- `actors`: an actor's loop, and the pauses in which the daemon is killed or remounted
- `savers`: actors that write checkpoints
- `readers`: actors that read and compare
- `users`: rm, mv, cp, rewriting, and the stepfs commands
- `driver`: the mount, the processes, the end of a run and the checks at the end
- `report`: counters as a table
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "tests/real/support", ROOT / "scripts"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
