"""Internal interface: names that the packages above use in addition to the public facade.

These names may change with any release; all packages are released together.

May import: _torch, context_options, routed_attention.
"""

from ._torch import flash_attention as flash_attention
from .context_options import ContextOptions as ContextOptions, Method as Method
from .routed_attention import RoutedAttention as RoutedAttention
