__version__ = "0.1.0"

import os

# Threads that wait by spinning make a step ten times slower as soon as another program wants a core. Read by the OpenMP
# runtime when torch is imported, so it is set here, before any module of the package imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
