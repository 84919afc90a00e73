"""From any placement to any placement: `plan` decides, `run` executes, neither knows the other.

May import: errors, layout.
"""
