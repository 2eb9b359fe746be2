"""The hot operations, each with a plain definition: pure functions of tensors on channels-last grids."""
