"""Several processes as one run: started here, or by a cluster's own launcher."""
