"""The methods that the paper compares with: one file per paper, none imports another; `models.variants` names them."""
