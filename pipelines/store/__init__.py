"""What is on record: manifests, attempts and the bill, in a folder or a bucket."""
