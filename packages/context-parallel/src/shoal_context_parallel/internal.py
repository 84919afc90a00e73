"""Internal interface: names that the packages above use in addition to the public facade.

These names may change with any release; all packages are released together.

May import: _torch, buffers, context_options.
"""

from ._torch import flash_attention as flash_attention
from .buffers import RoutedAttention as RoutedAttention
from .context_options import ContextOptions as ContextOptions, Method as Method
