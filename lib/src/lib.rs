//! Shared-memory links between processes.
