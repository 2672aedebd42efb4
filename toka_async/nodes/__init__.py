"""Several machines for one replica: how they join, are checked, and start ranks for the leader."""
