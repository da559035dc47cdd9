"""AdamW and Muon."""
