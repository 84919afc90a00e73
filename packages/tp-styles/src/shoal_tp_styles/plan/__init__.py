"""Styles by module path: resolved, verified, priced and applied."""
