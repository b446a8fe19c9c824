"""Many programs at once on one real mount, and what each of them may see.

    scenario    what a scenario file says
    training    small models that train, and their checkpoints
    content     what a file holds: whose state it is, its digests, what quantizing may have done to it
    ledger      what may be read of each file, kept by one process for all
    actors      an actor's loop, and the pauses in which the daemon is killed or mounted anew
    savers      those that write checkpoints
    readers     those that read and compare
    users       rm, mv, cp, rewriting, and the stepfs commands
    driver      the mount, the processes, the end of a run and what must be true then
    report      counters as a table
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "tests/real/support", ROOT / "scripts"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
