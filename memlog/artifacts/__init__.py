"""Files that a run kept: reading them as what they are, anybody's."""
