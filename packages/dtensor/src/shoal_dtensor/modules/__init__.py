"""What layers on modules share: stand-ins for forwards, owners of parameters, what goes along when one is replaced.

May import: _torch, errors, layout, tensor.
"""
