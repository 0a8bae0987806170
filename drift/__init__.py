"""DRIFT: a gradient-free memory that corrects a draft model's logits from what verification reveals. Torch only."""
