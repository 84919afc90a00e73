"""Parts that the packages for modules share: replaced forwards, and owners of parameters.

May import: _torch, errors, layout, tensor.
"""
