"""The search for the cheapest plan: states between two layouts, edges with costs, and A*.

May import: steps.
"""
