"""Event files of TensorBoard, and their framing."""
