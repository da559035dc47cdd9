"""What a run can do without. A folder is one extra, and none imports another's internals."""
