//! Random sequences against a simple model.
