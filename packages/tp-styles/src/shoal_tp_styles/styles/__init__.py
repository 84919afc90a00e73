"""The user's vocabulary: each style maps a module to its `ModuleSharding`."""
