"""How a Ray cluster is made for hispec_ray."""
