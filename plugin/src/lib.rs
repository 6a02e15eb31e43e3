//! The node's device plugin. Nothing of it is built yet; `docs/architecture.md` says what it will be.
