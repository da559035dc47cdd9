"""Tuning of a trained model: SFT, DPO, reward models, GRPO and RLOO by TRL."""
