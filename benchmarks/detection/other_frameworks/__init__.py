"""Programs of JAX, Keras, TensorFlow, XGBoost and LightGBM, each healthy and with a fault. They run in the environment of the frameworks."""
