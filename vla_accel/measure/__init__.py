"""What is measured: speed beside the floor, agreement with FP32, what a precision costs."""
