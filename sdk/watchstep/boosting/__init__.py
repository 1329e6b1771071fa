"""Recording of gradient boosting, independent of the library: rounds, trees, feature importance, predictions and SHAP values."""
