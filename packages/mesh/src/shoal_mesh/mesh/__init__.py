"""Device meshes: which rank is at which coordinate, and the process group along every axis."""
