"""`import bimetal` is `import generate`: one module under two names."""

import sys
from typing import TYPE_CHECKING

import generate

if TYPE_CHECKING:
    from generate import *  # noqa: F403

sys.modules[__name__] = generate
