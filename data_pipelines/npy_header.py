"""One thread at a time reads the header of a .npy or .npz file.

NumPy parses headers with `ast.literal_eval`, and Python 3.11 counts the recursion depth of all threads in one number:
two threads in it at once may fail with "SystemError: AST constructor recursion depth mismatch", which would look like a
damaged file.
"""

from __future__ import annotations

import threading

HEADER_LOCK = threading.Lock()
