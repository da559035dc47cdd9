"""Several machines that train one run: node 0, and its workers."""
