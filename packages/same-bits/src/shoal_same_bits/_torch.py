"""The seam to torch: every private or unstable torch name that this package alone uses."""

from torch.nn.modules.batchnorm import _NormBase

NormBase = _NormBase
