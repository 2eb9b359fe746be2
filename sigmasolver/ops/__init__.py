"""The hot operations, each with one plain definition: pure functions of tensors, channels last on the grid."""
