"Look at everything before a long run: `python scripts/preflight.py --preset 5b` is `hsmoe preflight --preset 5b`."
import sys
from hsmoe.cli import main
sys.argv.insert(1, "preflight")
main()
